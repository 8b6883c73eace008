// The search page: asks the same routes as every other client, and builds what it shows from text alone.
"use strict";

const POLL_MS = 15000;
const place = (id) => document.getElementById(id);

function made(tag, settings = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...inside);
  return element;
}

function say(text, refused = false) {
  place("status").textContent = text;
  place("status").classList.toggle("refused", refused);
}

class Refused extends Error {
  constructor(status, error) {
    super([error.message, error.hint].filter(Boolean).join("; "));
    this.status = status;
  }
}

async function ask(path, body) {
  const headers = {};
  const token = sessionStorage.getItem("token");
  if (token) headers["Authorization"] = `Bearer ${token}`;
  if (body) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Refused(0, { message: "the server does not answer", hint: "see whether it runs" });
  }
  const told = await reply.json().catch(() => ({}));
  if (reply.ok || (told.error === undefined && "ready" in told)) return told;
  if (reply.status === 401) {
    place("key").hidden = false;
    place("token").focus();
  }
  throw new Refused(reply.status, told.error ?? { message: `the server answered ${reply.status}` });
}

// Code points, as the server counts; a string's own index counts UTF-16 units.
function marked(text, snippet) {
  if (!snippet || snippet.stop === 0) return [text];
  const points = Array.from(text);
  const cut = (from, to) => points.slice(from, to).join("");
  return [cut(0, snippet.start), made("mark", {}, cut(snippet.start, snippet.stop)), cut(snippet.stop)];
}

function badge(answer) {
  const { coverage, exact } = answer;
  if (coverage.passages_searched < coverage.passages_total) {
    const searched = coverage.passages_searched.toLocaleString("en");
    const told = `partial: ${searched} of ${coverage.passages_total.toLocaleString("en")} passages`;
    return made("span", { class: "badge partial" }, told);
  }
  if (exact.certified) {
    return made("span", { class: "badge exact" }, exact.method === "flat" ? "exact" : `exact: ${exact.method}`);
  }
  const recall = exact.recall === null ? "" : `, recall ${exact.recall.toFixed(3)} when built`;
  return made("span", { class: "badge approximate" }, `approximate: ${exact.method}${recall}`);
}

function scoreTable(explained, num) {
  const scores = explained.views.map((view) => view.scores[0]);
  const low = Math.min(0, ...scores), high = Math.max(...scores, 1e-9);
  const won = explained.winners[0].view;
  const rows = explained.views.map((view) => {
    const stands = { feedback: "questions that this passage answered", passage: "the passage as a whole" };
    const score = view.scores[0];
    return made(
      "tr",
      view.view === won ? { class: "won" } : {},
      made("th", { scope: "row" }, view.view === won ? `${view.view} (best)` : `${view.view}`),
      made("td", { class: "number" }, score.toFixed(4),
        made("meter", { min: low, max: high, value: score, "aria-hidden": "true" })),
      made("td", {}, view.text ?? stands[view.kind]),
    );
  });
  const { lexical, total } = explained.winners[0];
  for (const [name, score] of [["words (BM25)", lexical], ["words and views together", total]]) {
    if (score !== null && score !== undefined) {
      rows.push(made("tr", {}, made("th", { scope: "row" }, ""), made("td", { class: "number" }, score.toFixed(4)),
        made("td", {}, name)));
    }
  }
  const head = made("tr", {}, ...["View", "Score", "Stands for"].map((name) => made("th", { scope: "col" }, name)));
  return made("table", { "aria-label": `Views of passage ${num}` }, made("thead", {}, head), made("tbody", {}, ...rows));
}

function viewsOf(question, hit, version, num) {
  const button = made("button", { type: "button", "aria-expanded": "false" }, "All views");
  const box = made("div", { class: "views" }, button);
  let table;
  button.addEventListener("click", async () => {
    const open = button.getAttribute("aria-expanded") === "true";
    if (!table) {
      try {
        const told = await ask("v1/explain", { questions: [question], passages: [hit.id], version });
        table = scoreTable(told.passages[0], num);
        box.append(table);
      } catch (error) {
        say(error.message, true);
        return;
      }
    }
    table.hidden = open;
    button.setAttribute("aria-expanded", String(!open));
  });
  return box;
}

function shown(hit, rank, question, version, other) {
  const was = other?.get(hit.id);
  const moved = other === undefined ? "" : was === undefined ? "not in the other list" : was === rank ? "" : `there ${was}`;
  const part = hit.snippet?.stop === 0 ? "title, " : "";
  const isHybrid = hit.lexical !== null && hit.lexical !== undefined;
  const parts = isHybrid ? ` (words ${hit.lexical.toFixed(4)}, view ${hit.dense.toFixed(4)})` : "";
  const kind = hit.feedback ? "feedback view" : hit.snippet ? `${part}view ${hit.view}` : "whole passage";
  return made(
    "li",
    {},
    made("h3", {}, `${rank}. ${hit.title || hit.id}`),
    made("p", { class: "soft" }, `${hit.score.toFixed(4)}${parts}, ${kind}, id ${hit.id} `,
      ...(moved ? [made("span", { class: "moved" }, moved)] : [])),
    made("p", {}, ...marked(hit.text ?? "", hit.snippet)),
    viewsOf(question, hit, version, rank),
  );
}

function column(answer, question, other) {
  const ranks = other && new Map(other.results[0].map((hit, at) => [hit.id, at + 1]));
  const title = made("h2", {}, `Version ${answer.version}`);
  const took = made("span", { class: "soft" }, `${answer.took_ms.toFixed(0)} ms, encoder ${answer.encoder_fingerprint.slice(0, 8)}`);
  const hits = answer.results[0].map((hit, at) => shown(hit, at + 1, question, answer.version, ranks));
  return made("section", { "aria-label": `Answers of version ${answer.version}` },
    made("div", { class: "told" }, title, badge(answer), took), made("ol", { class: "hits" }, ...hits));
}

function showShards(shards) {
  const silent = shards.filter((shard) => shard.state !== "searched");
  const passages = shards.reduce((sum, shard) => sum + shard.passages, 0).toLocaleString("en");
  if (silent.length) place("shards-box").open = true;
  place("shards-told").textContent = silent.length
    ? `${silent.length} of ${shards.length} shards are not searched`
    : `all ${shards.length} shards searched, ${passages} passages`;
  place("shards").replaceChildren(
    ...shards.map((shard) =>
      made("li", shard.state === "searched" ? {} : { class: "silent" },
        `${shard.shard}: ${shard.state}, ${shard.passages.toLocaleString("en")}`)),
  );
}

function chosen(id) {
  const value = place(id).value;
  return value ? Number(value) : null;
}

async function search() {
  place("welcome").hidden = true;
  const question = place("question").value, k = Number(place("k").value);
  const version = chosen("version"), beside = chosen("beside");
  const settings = new URLSearchParams({ q: question, k: String(k) });
  if (version) settings.set("version", version);
  if (beside) settings.set("beside", beside);
  history.replaceState(null, "", `?${settings}`);
  say("Searching…");
  try {
    const one = (number) => ask("v1/search", { queries: [question], k, version: number, min_coverage: 0 });
    const answers = await Promise.all(beside ? [one(version), one(beside)] : [one(version)]);
    const [first, second] = answers;
    place("answers").replaceChildren(column(first, question, second), ...(second ? [column(second, question, first)] : []));
    showShards(first.coverage.shards);
    say(`${first.results[0].length} results`);
  } catch (error) {
    place("answers").replaceChildren();
    say(error.message, true);
  }
}

async function versions() {
  const told = await ask("v1/versions");
  const named = (version) => `${version.version} (${version.operation}${version.live ? ", live" : ""})`;
  const choices = told.versions.slice().reverse();
  place("version").replaceChildren(made("option", { value: "" }, "newest"),
    ...choices.map((version) => made("option", { value: version.version }, named(version))));
  place("beside").replaceChildren(made("option", { value: "" }, "none"),
    ...choices.map((version) => made("option", { value: version.version }, named(version))));
  const live = choices.find((version) => version.live) ?? choices[0];
  place("about").textContent = `Index ${told.index}: ${live.passages.toLocaleString("en")} passages, ` +
    `${live.vectors.toLocaleString("en")} views, version ${live.version}`;
}

async function welcome() {
  const told = await ask("v1/examples").catch(() => ({ queries: [] }));
  const choices = told.queries.map((text) => {
    const button = made("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      place("question").value = text;
      search();
    });
    return made("li", {}, button);
  });
  place("examples").replaceChildren(...choices);
  place("welcome").hidden = choices.length === 0 || place("answers").childElementCount > 0;
}

async function poll() {
  try {
    const told = await ask("readyz");
    if (told.shards) showShards(told.shards);
  } catch (error) {
    place("shards-told").textContent = error.message;
  }
}

function fill(settings, names) {
  for (const [id, name] of names) {
    if (settings.has(name)) place(id).value = settings.get(name);
  }
}

async function begin(settings) {
  fill(settings, [["question", "q"], ["k", "k"]]);
  try {
    await versions();
  } catch (error) {
    place("about").textContent = "";
    say(error.message, true);
    return false;
  }
  fill(settings, [["version", "version"], ["beside", "beside"]]);
  return true;
}

place("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = place("token").value;
  if (token) {
    sessionStorage.setItem("token", token);
    place("token").value = "";
    place("key").hidden = true;
    const settings = new URLSearchParams(location.search);
    if (!(await begin(new URLSearchParams([...settings].filter(([name]) => name !== "q" && name !== "k"))))) return;
  }
  await search();
});
setInterval(poll, POLL_MS);
begin(new URLSearchParams(location.search)).then(async (known) => {
  if (known) await (place("question").value ? search() : welcome());
  await poll();
});
