"use strict";
// Shows /nibble/live every 2 s. All values are set as text, so that no server text becomes markup.

const POLL_MS = 2000, HIDDEN_POLL_MS = 10000, TIMEOUT_MS = 8000, GIB = 2 ** 30;
const KEY = "nibble-key";
const by = (id) => document.getElementById(id);
let planOf = null, lastSeen = null, lastState = "", asking = null;
let isRefused = false; // the last key, or none, by a chat: the control port needs one only there

function make(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
};

// Values in words

const NONE = "–";
const number = (value, digits = 0) => value == null ? NONE
  : value.toLocaleString("en", { maximumFractionDigits: digits });
const gib = (bytes) => bytes == null ? NONE : `${(bytes / GIB).toFixed(1)} GiB`;
const percent = (share) => share == null ? NONE : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 100) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

// Parts of the page

function showState(text, level) {
  setText(by("state"), text);
  by("state").className = `badge ${level}`;
  document.title = `${text} – nibble`;
}

function showProblems(problems) {
  const box = by("problems"), text = JSON.stringify(problems);
  if (box.dataset.shown === text) return; // a screen reader would read it again
  box.dataset.shown = text;
  box.replaceChildren(...problems.map((one) => {
    const card = make("div", undefined, `card problem ${one.level}`);
    card.append(make("p", one.what, "what"), make("p", one.action));
    return card;
  }));
  box.hidden = problems.length === 0;
}

function showStart(live) {
  const history = live.history || [], last = live.last_start_s || {};
  const isOver = live.state === "ready" || live.state === "paused";
  const start = by("start");
  start.hidden = history.length === 0;
  if (start.dataset.over !== String(isOver)) { // else the user's choice stays
    start.dataset.over = String(isOver);
    start.open = !isOver;
  }
  const left = live.eta_s == null ? "no earlier start of this plan to compare with"
    : `ready in about ${duration(live.eta_s)} if it takes as long as the last start`;
  const since = duration(live.seconds_in_phase);
  const shownDetail = typeof live.detail === "string" && live.detail ? ` (${live.detail})` : "";
  setText(by("eta"), isOver ? `Ready for ${duration(live.seconds_in_phase)}.`
    : `${live.phase}${shownDetail} for ${since}; ${left}.`);
  const bar = by("progress");
  bar.hidden = isOver || live.progress == null;
  if (live.progress != null) bar.value = live.progress;
  const names = [...new Set([...Object.keys(last), ...history.map((one) => one.phase)])];
  names.sort((a, b) => order(history, last, a) - order(history, last, b));
  by("phases").replaceChildren(...names.filter((name) => name !== "ready").map((name) => {
    const at = history.findIndex((one) => one.phase === name);
    const end = history[at + 1] ? history[at + 1].at_s : live.seconds_since_start;
    const row = make("tr", undefined, name === live.phase ? "current" : "");
    const head = make("th", name);
    head.scope = "row";
    if (name === live.phase) row.setAttribute("aria-current", "step");
    row.append(head, make("td", at < 0 ? NONE : duration(end - history[at].at_s), "number"),
      make("td", duration(last[name]), "number"));
    return row;
  }));
  setText(by("last-line"), live.last_line || NONE);
}
function order(history, last, name) {
  const at = history.findIndex((one) => one.phase === name);
  return at >= 0 ? at : 100 + Object.keys(last).indexOf(name);
}

function list(box, pairs) {
  const text = JSON.stringify(pairs);
  if (box.dataset.shown === text) return;
  box.dataset.shown = text;
  box.replaceChildren(...pairs.map(([name, value, small, level]) => {
    const group = document.createDocumentFragment();
    const shown = make("dd", value, level);
    if (small) shown.append(make("small", small));
    group.append(make("dt", name), shown);
    if (box.id !== "tiles") return group;
    const tile = make("div");
    tile.append(group);
    return tile;
  }));
}

function showTraffic(live) {
  const now = live.traffic || {};
  const first = now.first_token_s || {}, between = now.between_tokens_s || {};
  list(by("tiles"), [
    ["Generated tokens/s", number(now.generated_tokens_per_s, 1), "last 10 s"],
    ["Prompt tokens/s", number(now.prompt_tokens_per_s, 1), "last 10 s"],
    ["Running requests", number(now.running), `${number(now.answered_total)} answered`],
    ["Queue", number(now.waiting), "requests that wait"],
    ["KV cache in use", percent(now.kv_share), cacheSize(live.facts)],
    ["Time to first token", duration(first.p50), `95 %: ${duration(first.p95)}, last minute`],
    ["Time between tokens", duration(between.p50), `95 %: ${duration(between.p95)}, last minute`],
  ]);
}
const cacheSize = (facts) => facts && facts.kv_cache_tokens
  ? `of ${number(facts.kv_cache_tokens)} tokens` : "";

function showFacts(live) {
  const pairs = [], memory = live.memory || {};
  if (memory.available_bytes != null) {
    const level = { pause: "amber", stop: "red" }[memory.action] || "green";
    pairs.push(["Memory", `${gib(memory.available_bytes)} available of ${gib(memory.total_bytes)}`,
      memory.pause_below_bytes ? `The watchdog stops admission below ${gib(memory.pause_below_bytes)}`
        + ` and the engine below ${gib(memory.stop_below_bytes)}.` : "", level]);
  }
  if (live.assertion) {
    pairs.push(["Kernels", live.assertion.verdict, kernels(live.assertion.ran),
      verdictLevel(live.assertion.verdict)]);
  }
  if (live.canary) {
    pairs.push(["Canary", live.canary.verdict, (live.canary.findings || [])
      .map((one) => `${one.mechanism}: ${one.detail}`).join("; "), verdictLevel(live.canary.verdict)]);
  }
  for (const gpu of live.gpus || []) {
    pairs.push([`GPU ${gpu.index}`, `${number(gpu.celsius)} °C, ${number(gpu.sm_mhz)} of `
      + `${number(gpu.max_sm_mhz)} MHz, ${number(gpu.watts)} of ${number(gpu.limit_watts)} W`, ""]);
  }
  if (live.pid) pairs.push(["Process", `${live.pid}`, live.build ? `build ${live.build}` : ""]);
  if (live.url) pairs.push(["Address", live.url, ""]);
  if (live.failed_starts) pairs.push(["Failed starts before", number(live.failed_starts), ""]);
  list(by("facts"), pairs);
}
const verdictLevel = (verdict) => ({ passed: "green", failed: "red" })[verdict] || "";
function kernels(ran) {
  if (!ran || !ran.length) return "";
  return ["linear", "moe", "attention"].flatMap((part) => Object.entries(ran[0][part])
    .map(([name, layers]) => `${part}: ${name} in ${layers} layers`)).join("; ");
}

function showModels(models) {
  by("models-card").hidden = by("chat-models").hidden = !models;
  by("plan-card").hidden = Boolean(models); // each model has its own: nibble plan MODEL
  if (!models) return;
  by("models").replaceChildren(...models.map((one) => {
    const row = make("tr"), head = make("th", one.names.join(", "));
    head.scope = "row";
    const level = { ready: "green", failed: "red", holding: "red" }[one.state] || "";
    const isBusy = one.state === "loading" && one.phase;
    const left = isBusy && one.eta_s != null ? `, about ${duration(one.eta_s)} left` : "";
    const state = make("td", isBusy ? `${one.state}: ${one.phase}${left}` : one.state, level);
    if (one.reason) state.append(make("small", ` ${one.reason}`));
    const rate = one.traffic ? one.traffic.generated_tokens_per_s : null;
    row.append(head, state, make("td", gib(one.total_bytes), "number"),
      make("td", number(one.running), "number"), make("td", number(one.waiting), "number"),
      make("td", number(rate, 1), "number"),
      make("td", one.canary ? one.canary.verdict : NONE, verdictLevel(one.canary?.verdict)));
    return row;
  }));
  const names = models.map((one) => one.names[0]), select = by("chat-model");
  if (select.dataset.shown !== names.join()) {
    select.dataset.shown = names.join();
    select.replaceChildren(...names.map((name) => make("option", name)));
  }
}

function showPlan(plan) {
  by("plan").replaceChildren(...["choices", "args", "env"].flatMap((group) =>
    Object.entries(plan[group] || {}).map(([name, choice]) => {
      const row = make("tr"), head = make("th", name);
      head.scope = "row";
      const value = choice.value === null ? "none" : typeof choice.value === "string" ? choice.value : JSON.stringify(choice.value);
      row.append(head, make("td", value), make("td", choice.source), make("td", choice.reason));
      return row;
    })));
}

// Asking the server

async function get(path) {
  const answer = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401) throw new Locked();
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}
class Locked extends Error {}

async function poll() {
  try {
    const live = await get("nibble/live");
    lastSeen = Date.now();
    lastState = live.state;
    show(live);
    if (live.pid !== planOf && live.served_names) {
      showPlan((await get("nibble/status")).plan || {});
      planOf = live.pid;
    }
  } catch (error) {
    if (error instanceof Locked) locked(); else lost();
  }
  setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

function show(live) {
  if (live.state !== "ready" || !isRefused) by("key-form").hidden = true;
  document.body.classList.remove("lost");
  const isRed = live.problems.some((one) => one.level === "red");
  const phase = live.phase === live.state ? "" : `: ${live.phase}`;
  const level = isRed ? "red" : live.state === "ready" ? "green" : "amber";
  showState(isRed && live.state === "ready" ? "ready, with a problem" : live.state + phase, level);
  setText(by("model"), (live.served_names || []).join(", "));
  showProblems(live.problems);
  showStart(live);
  showModels(live.models);
  showTraffic(live);
  showFacts(live);
  by("send").disabled = live.state !== "ready" || asking !== null;
}

function locked() {
  showState("key needed", "amber");
  by("send").disabled = true;
  askForKey();
}

function askForKey() {
  by("key-form").hidden = false;
  if (sessionStorage.getItem(KEY)) {
    setText(by("key-note"), "The server refused this key.");
    sessionStorage.removeItem(KEY);
  }
}

function lost() {
  by("send").disabled = true;
  by("key-form").hidden = true;
  document.body.classList.add("lost"); // old values would look like the present
  showState("no answer", "red");
  if (lastSeen !== null) {
    const ago = duration(Math.round((Date.now() - lastSeen) / 5000) * 5 || 1);
    const what = lastState === "draining" ? "The server has stopped."
      : `The server ended or cannot be reached (last answer ${ago} ago, state ${lastState}).`;
    showProblems([{ level: lastState === "draining" ? "amber" : "red", what,
      action: "Read the log (nibble logs, or the container's): the last line names the cause."
        + " nibble doctor checks the machine. This page continues when the server is back." }]);
  }
}

// Key and chat

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, by("key").value.trim());
  by("key").value = "";
  by("key-form").hidden = true;
  isRefused = false;
  setText(by("key-note"), "The key stays in this tab and is sent in a header.");
});

by("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (asking !== null) return;
  asking = new AbortController();
  by("send").disabled = true;
  const answer = by("answer");
  answer.textContent = "";
  answer.setAttribute("aria-busy", "true"); // read once it is whole
  try {
    await ask(by("question").value, (piece) => answer.append(piece), asking.signal);
  } catch (error) {
    answer.append(make("p", `No answer: ${error.message}`, "red"));
  }
  answer.setAttribute("aria-busy", "false");
  asking = null;
  by("send").disabled = lastState !== "ready";
});

async function ask(question, add, signal) {
  const body = JSON.stringify({ model: by("chat-model").value || "default", stream: true, max_tokens: 512,
    messages: [{ role: "user", content: question }] });
  const answer = await fetch("v1/chat/completions", { method: "POST", body, signal,
    headers: { ...headers(), "Content-Type": "application/json" } });
  isRefused = answer.status === 401;
  if (isRefused) {
    askForKey();
    throw new Error("enter the API key above, then send again");
  }
  if (!answer.ok) throw new Error(await reason(answer));
  const decoder = new TextDecoder(), reader = answer.body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices || []) add(choice.delta.content || "");
    }
  }
}
async function reason(answer) {
  try { return (await answer.json()).error.message; } catch { return `status ${answer.status}`; }
}

poll();
