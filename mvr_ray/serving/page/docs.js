// The page of the routes: shows this server's own openapi.json, and sends requests to it.
"use strict";

const place = (id) => document.getElementById(id);

function made(tag, settings = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function headers(body) {
  const token = sessionStorage.getItem("token");
  return { ...(token && { Authorization: `Bearer ${token}` }), ...(body && { "Content-Type": "application/json" }) };
}

const resolved = (schema, all) => (schema.$ref ? all[schema.$ref.split("/").pop()] : schema);

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
    made("tr", {}, made("th", { scope: "row" }, name), made("td", {}, kind(field, all)),
      made("td", {}, required.has(name) ? "required" : `default ${JSON.stringify(field.default ?? null)}`),
      made("td", {}, field.description ?? "")));
  const head = ["Field", "Type", "", "Meaning"].map((name) => made("th", { scope: "col" }, name));
  return made("table", {}, made("thead", {}, made("tr", {}, ...head)), made("tbody", {}, ...rows));
}

function sender(method, path, example) {
  const url = made("input", { "aria-label": `Path of ${method} ${path}`, value: path.slice(1), spellcheck: "false" });
  const body = example && made("textarea", { "aria-label": `Body of ${method} ${path}`, rows: "6", spellcheck: "false" });
  if (body) body.value = JSON.stringify(example, null, 2);
  const reply = made("pre", { "aria-live": "polite" });
  const form = made("form", { autocomplete: "off" }, made("div", { class: "field wide" }, url, ...(body ? [body] : [])),
    made("button", { type: "submit" }, "Send"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const answer = await fetch(url.value, { method, headers: headers(body), body: body?.value });
      const text = await answer.text();
      let shown = text;
      try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* metrics are no JSON */ }
      reply.textContent = `${answer.status}\n${shown}`;
    } catch {
      reply.textContent = "the server does not answer; see whether it runs";
    }
  });
  return [form, reply];
}

function route(method, path, operation, all) {
  const content = operation.requestBody?.content?.["application/json"]?.schema;
  const schema = content && resolved(content, all);
  const meanings = Object.entries(operation.responses).map(([status, one]) =>
    made("li", {}, made("code", {}, status), ` ${one.description}`));
  return made("details", {},
    made("summary", {}, made("code", {}, `${method} ${path}`), ` ${operation.summary ?? ""}`),
    made("p", {}, operation.description ?? ""),
    ...(schema ? [fieldTable(schema, all)] : []),
    ...sender(method, path, schema && (schema.examples?.[0] ?? {})),
    made("h3", {}, "Answers"), made("ul", { class: "soft" }, ...meanings));
}

async function begin() {
  const reply = await fetch("openapi.json", { headers: headers() }).catch(() => undefined);
  place("key").hidden = reply?.status !== 401;
  if (!reply?.ok) {
    place("status").textContent = reply?.status === 401
      ? "This server asks for a token." : "the server does not answer; see whether it runs";
    return;
  }
  const described = await reply.json(), all = described.components.schemas;
  const routes = Object.entries(described.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => route(method.toUpperCase(), path, operation, all)));
  place("status").textContent = `${described.info.description} Version ${described.info.version}.`;
  place("routes").replaceChildren(...routes);
}

place("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", place("token").value);
  place("token").value = "";
  begin();
});
begin();
