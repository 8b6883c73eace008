// The page of the routes: shows this server's own openapi.json, and sends requests to it.
"use strict";

const resolve = (schema, all) => (schema.$ref ? all[schema.$ref.split("/").pop()] : schema);

// A type in words, such as "list of string or null".
function kind(schema, all) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((one) => kind(one, all)).join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items ?? {}, all)}`;
  const limits = [];
  if (schema.minimum !== undefined) limits.push(`from ${schema.minimum}`);
  if (schema.maximum !== undefined) limits.push(`to ${schema.maximum}`);
  return [schema.type ?? "anything", ...limits].join(" ");
}

function fieldTable(schema, all) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, kind(field, all)),
      make("td", {}, required.has(name) ? "required" : `default ${JSON.stringify(field.default ?? null)}`),
      make("td", {}, field.description ?? "")));
  const head = ["Field", "Type", "", "Meaning"].map((name) => make("th", { scope: "col" }, name));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

function sender(method, path, example) {
  const url = make("input", { "aria-label": `Path of ${method} ${path}`, value: path.slice(1), spellcheck: "false" });
  const body = example && make("textarea", { "aria-label": `Body of ${method} ${path}`, rows: "6", spellcheck: "false" });
  if (body) body.value = JSON.stringify(example, null, 2);
  const reply = make("pre", { "aria-live": "polite" });
  const form = make("form", { autocomplete: "off" }, make("div", { class: "field wide" }, url, ...(body ? [body] : [])),
    make("button", { type: "submit" }, "Send"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const answer = await fetch(url.value, { method, headers: headers(body), body: body?.value });
      const text = await answer.text();
      let output = text;
      try { output = JSON.stringify(JSON.parse(text), null, 2); } catch { /* metrics are no JSON */ }
      reply.textContent = `${answer.status}\n${output}`;
    } catch {
      reply.textContent = "the server does not answer; see whether it runs";
    }
  });
  return [form, reply];
}

function route(method, path, operation, all) {
  const content = operation.requestBody?.content?.["application/json"]?.schema;
  const schema = content && resolve(content, all);
  const meanings = Object.entries(operation.responses).map(([status, one]) =>
    make("li", {}, make("code", {}, status), ` ${one.description}`));
  return make("details", {},
    make("summary", {}, make("code", {}, `${method} ${path}`), ` ${operation.summary ?? ""}`),
    make("p", {}, operation.description ?? ""),
    ...(schema ? [fieldTable(schema, all)] : []),
    ...sender(method, path, schema && (schema.examples?.[0] ?? {})),
    make("h3", {}, "Answers"), make("ul", { class: "soft" }, ...meanings));
}

async function begin() {
  const reply = await fetch("openapi.json", { headers: headers() }).catch(() => undefined);
  byId("key").hidden = reply?.status !== 401;
  if (!reply?.ok) {
    say(reply?.status === 401 ? "This server asks for a token." : "the server does not answer; see whether it runs");
    return;
  }
  const openapi = await reply.json(), all = openapi.components.schemas;
  const routes = Object.entries(openapi.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => route(method.toUpperCase(), path, operation, all)));
  say(`${openapi.info.description} Version ${openapi.info.version}.`);
  byId("routes").replaceChildren(...routes);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  if (storeToken()) begin();
});
begin();
