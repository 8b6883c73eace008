// The search page: calls the same routes as every other client, and inserts results as text only.
"use strict";

const POLL_MS = 15000;

class RequestError extends Error {
  constructor(status, error) {
    super([error.message, error.hint].filter(Boolean).join("; "));
    this.status = status;
  }
}

async function request(path, body) {
  let reply;
  try {
    const method = body ? "POST" : "GET";
    reply = await fetch(path, { method, headers: headers(body), body: body && JSON.stringify(body) });
  } catch {
    throw new RequestError(0, { message: "the server does not answer", hint: "see whether it runs" });
  }
  const content = await reply.json().catch(() => ({}));
  if (reply.ok || (content.error === undefined && "ready" in content)) return content;
  if (reply.status === 401) askForToken();
  throw new RequestError(reply.status, content.error ?? { message: `the server answered ${reply.status}` });
}

// Code points, as the server counts; a string's own index counts UTF-16 units.
function markSnippet(text, snippet) {
  if (!snippet || snippet.stop === 0) return [text];
  const points = Array.from(text);
  const cut = (from, to) => points.slice(from, to).join("");
  return [cut(0, snippet.start), make("mark", {}, cut(snippet.start, snippet.stop)), cut(snippet.stop)];
}

function badge(answer) {
  const { coverage, exact } = answer;
  if (coverage.passages_searched < coverage.passages_total) {
    const searched = coverage.passages_searched.toLocaleString("en");
    const label = `partial: ${searched} of ${coverage.passages_total.toLocaleString("en")} passages`;
    return make("span", { class: "badge partial" }, label);
  }
  if (exact.certified) {
    return make("span", { class: "badge exact" }, exact.method === "flat" ? "exact" : `exact: ${exact.method}`);
  }
  const recall = exact.recall === null ? "" : `, recall ${exact.recall.toFixed(3)} when built`;
  return make("span", { class: "badge approximate" }, `approximate: ${exact.method}${recall}`);
}

function scoreTable(explained, num) {
  const scores = explained.views.map((view) => view.scores[0]);
  const low = Math.min(0, ...scores), high = Math.max(...scores, 1e-9);
  const best = explained.winners[0].view;
  const rows = explained.views.map((view) => {
    const stands = {
      feedback: "questions that this passage answered",
      passage: "the passage as a whole",
      snippet: "no snippet: a viewer after the last one",
      title: "no title",
    };
    const score = view.scores[0];
    return make(
      "tr",
      view.view === best ? { class: "best" } : {},
      make("th", { scope: "row" }, view.view === best ? `${view.view} (best)` : `${view.view}`),
      make("td", { class: "number" }, score.toFixed(4),
        make("meter", { min: low, max: high, value: score, "aria-hidden": "true" })),
      make("td", { dir: "auto" }, view.text || stands[view.kind]),
    );
  });
  const { lexical, total } = explained.winners[0];
  for (const [name, score] of [["words (BM25)", lexical], ["words and views together", total]]) {
    if (score !== null && score !== undefined) {
      rows.push(make("tr", {}, make("th", { scope: "row" }, ""), make("td", { class: "number" }, score.toFixed(4)),
        make("td", {}, name)));
    }
  }
  const head = make("tr", {}, ...["View", "Score", "Stands for"].map((name) => make("th", { scope: "col" }, name)));
  return make("table", { "aria-label": `Views of passage ${num}` }, make("thead", {}, head), make("tbody", {}, ...rows));
}

function viewsOf(question, hit, version, num) {
  const button = make("button", { type: "button", "aria-expanded": "false" }, "All views");
  const box = make("div", { class: "views" }, button);
  let table;
  button.addEventListener("click", async () => {
    const open = button.getAttribute("aria-expanded") === "true";
    if (!table) {
      button.disabled = true;
      try {
        const explanation = await request("v1/explain", { questions: [question], passages: [hit.id], version });
        table = scoreTable(explanation.passages[0], num);
        box.append(table);
      } catch (error) {
        say(error.message, true);
        return;
      } finally {
        button.disabled = false;
      }
    }
    table.hidden = open;
    button.setAttribute("aria-expanded", String(!open));
  });
  return box;
}

function hitItem(hit, rank, question, version, other) {
  const was = other?.get(hit.id);
  const moved = other === undefined ? "" : was === undefined ? "not in the other list" : was === rank ? "" : `there ${was}`;
  const part = hit.snippet?.stop === 0 ? "title, " : "";
  const isHybrid = hit.lexical !== null && hit.lexical !== undefined;
  const parts = isHybrid ? ` (words ${hit.lexical.toFixed(4)}, view ${hit.dense.toFixed(4)})` : "";
  const kind = hit.feedback ? "feedback view" : hit.snippet ? `${part}view ${hit.view}` : "whole passage";
  return make(
    "li",
    {},
    make("h3", {}, `${rank}. `, make("bdi", {}, hit.title || hit.id)),
    make("p", { class: "soft" }, `${hit.score.toFixed(4)}${parts}, ${kind}, id `, make("bdi", {}, hit.id), " ",
      ...(moved ? [make("span", { class: "moved" }, moved)] : [])),
    make("p", { dir: "auto" }, ...markSnippet(hit.text ?? "", hit.snippet)),
    viewsOf(question, hit, version, rank),
  );
}

function column(answer, question, other) {
  const ranks = other && new Map(other.results[0].map((hit, at) => [hit.id, at + 1]));
  const title = make("h2", {}, `Version ${answer.version}`);
  const took = make("span", { class: "soft" }, `${answer.took_ms.toFixed(0)} ms, encoder ${answer.encoder_fingerprint.slice(0, 8)}`);
  const hits = answer.results[0].map((hit, at) => hitItem(hit, at + 1, question, answer.version, ranks));
  return make("section", { "aria-label": `Answers of version ${answer.version}` },
    make("div", { class: "heading" }, title, badge(answer), took), make("ol", { class: "hits" }, ...hits));
}

function showShards(shards) {
  const missing = shards.filter((shard) => shard.state !== "searched");
  const passages = shards.reduce((sum, shard) => sum + shard.passages, 0).toLocaleString("en");
  if (missing.length) byId("shards-box").open = true;
  byId("shards-summary").textContent = missing.length
    ? `${missing.length} of ${shards.length} shards are not searched`
    : `all ${shards.length} shards searched, ${passages} passages`;
  byId("shards").replaceChildren(
    ...shards.map((shard) =>
      make("li", shard.state === "searched" ? {} : { class: "missing" },
        `${shard.shard}: ${shard.state}, ${shard.passages.toLocaleString("en")}`)),
  );
}

function selectedNumber(id) {
  const value = byId(id).value;
  return value ? Number(value) : null;
}

let searches = 0;

async function search() {
  const number = ++searches;
  byId("welcome").hidden = true;
  const question = byId("question").value, k = Number(byId("k").value);
  const version = selectedNumber("version"), beside = selectedNumber("beside");
  const settings = new URLSearchParams({ q: question, k: String(k) });
  if (version) settings.set("version", version);
  if (beside) settings.set("beside", beside);
  history.replaceState(null, "", `?${settings}`);
  say("Searching…");
  try {
    const one = (of) => request("v1/search", { queries: [question], k, version: of, min_coverage: 0 });
    const answers = await Promise.all(beside ? [one(version), one(beside)] : [one(version)]);
    if (number !== searches) return;  // a later search has begun
    const [first, second] = answers;
    byId("answers").replaceChildren(column(first, question, second), ...(second ? [column(second, question, first)] : []));
    showShards(first.coverage.shards);
    say(`${first.results[0].length} results`);
  } catch (error) {
    if (number !== searches) return;
    byId("answers").replaceChildren();
    say(error.message, true);
  }
}

async function versions() {
  const list = await request("v1/versions");
  const label = (version) => `${version.version} (${version.operation}${version.live ? ", live" : ""})`;
  const choices = list.versions.slice().reverse();
  byId("version").replaceChildren(make("option", { value: "" }, "newest"),
    ...choices.map((version) => make("option", { value: version.version }, label(version))));
  byId("beside").replaceChildren(make("option", { value: "" }, "none"),
    ...choices.map((version) => make("option", { value: version.version }, label(version))));
  const own = choices.find((version) => version.version === list.serving);
  const sizes = own ? `${own.passages.toLocaleString("en")} passages, ${own.vectors.toLocaleString("en")} views, ` : "";
  const newest = list.live === list.serving ? "" : `; version ${list.live} is live, and not open here`;
  byId("about").textContent = `Index ${list.index}: ${sizes}version ${list.serving}${newest}`;
}

async function welcome() {
  const examples = await request("v1/examples").catch(() => ({ queries: [] }));
  const choices = examples.queries.map((text) => {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      byId("question").value = text;
      search();
    });
    return make("li", {}, button);
  });
  byId("examples").replaceChildren(...choices);
  byId("welcome").hidden = choices.length === 0 || byId("answers").childElementCount > 0;
}

async function poll() {
  try {
    const readiness = await request("readyz");
    if (readiness.shards) showShards(readiness.shards);
  } catch (error) {
    byId("shards-summary").textContent = error.message;
  }
}

function fill(settings, names) {
  for (const [id, name] of names) {
    if (settings.has(name)) byId(id).value = settings.get(name);
  }
}

async function begin(settings) {
  fill(settings, [["question", "q"], ["k", "k"]]);
  try {
    await versions();
  } catch (error) {
    byId("about").textContent = "";
    say(error.message, true);
    return false;
  }
  fill(settings, [["version", "version"], ["beside", "beside"]]);
  return true;
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (byId("token").value) {
    if (!storeToken()) return;
    const settings = new URLSearchParams(location.search);
    if (!(await begin(new URLSearchParams([...settings].filter(([name]) => name !== "q" && name !== "k"))))) return;
  }
  await search();
});
setInterval(poll, POLL_MS);
begin(new URLSearchParams(location.search)).then(async (hasVersions) => {
  if (hasVersions) await (byId("question").value ? search() : welcome());
  await poll();
});
