// Asks the server once a second what it is doing, and shows it.

import { call, token } from "./api.js";
import { latencyChart, queueChart, rateChart } from "./chart.js";
import { Detail } from "./detail.js";
import { ago, attribute, byId, bytes, count, h, legend, millis, rate, strip, text } from "./dom.js";
import { History, keyOf } from "./history.js";

const PERIOD_MS = 1000;
const RETRY_MS = 3000;
const STAGES = ["awake", "waking", "parked", "asleep", "failed", "closing", "unloaded"];

const history = new History();
let overview = null;
let detail = null;
let cpu = null;
let timer = 0;
let asking = null;

const charts = [
  ["chart-rate", rateChart("Requests per second", (value) => `${rate(value)}/s`)],
  ["chart-latency", latencyChart("Mean latency", millis)],
  ["chart-queue", queueChart("Waiting requests", count)],
];
for (const [id, one] of charts) byId(id).append(one.root);

// ---- asking

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  const wanted = place();
  // A model that is open is asked for by name, so that it is told of however many there are.
  const search = wanted ? wanted.name : byId("search").value.trim();
  let wait = PERIOD_MS;
  try {
    const { data } = await call(`v2/dormouse/overview?limit=300&search=${encodeURIComponent(search)}`, { signal });
    overview = data;
    history.add(data);
    notice(null);
    show();
  } catch (error) {
    if (error.name === "AbortError") return;
    wait = RETRY_MS;
    health("gone", error.status === 0 ? "not reached" : "refused");
    notice(error.message, error.isRefusal);
  }
  // Nobody looks at a page in the background; it is asked again when it is shown.
  if (!signal.aborted && !document.hidden) timer = setTimeout(ask, wait);
}

function notice(message, wantsToken = false) {
  const element = byId("notice");
  element.hidden = !message;
  if (!message) return;
  element.replaceChildren(message, wantsToken ? " " : "",
    wantsToken ? h("button", { type: "button", class: "quiet", onclick: openToken }, "Give a token") : "");
}

function health(state, label) {
  attribute(byId("health"), "data-state", state);
  text(byId("health"), label);
}

// ---- showing

function show() {
  const { server } = overview;
  text(byId("server"), `${server.name} · ${server.version}`);
  document.title = server.name === "dormouse" ? "Dormouse" : `${server.name} · Dormouse`;
  health(server.ready ? "ready" : "starting", server.ready ? "ready" : "not ready");
  text(byId("uptime"), `up for ${ago(server.uptime_ms).replace(" ago", "").replace("now", "a moment")}`);
  const wanted = place();
  if (wanted) {
    const model = overview.models.find((one) => one.name === wanted.name && one.version === wanted.version);
    detail?.update(model, history.of(wanted), server.now_unix_ms);
    return;
  }
  for (const [, one] of charts) one.draw(history.all.points);
  showTiles();
  showModels();
  showDevices();
}

function showTiles() {
  const { counts, memory, models } = overview;
  text(byId("awake"), count(counts.awake));
  text(byId("of-models"), `of ${count(counts.models)} ${counts.models === 1 ? "model" : "models"}`);
  const stages = STAGES.map((stage) => [stage, models.filter((model) => model.stage === stage).length]).filter(([, found]) => found > 0);
  const all = stages.reduce((sum, [, found]) => sum + found, 0) || 1;
  byId("stage-strip").replaceChildren(strip(stages.map(([stage, found]) => [stage, found / all])),
    legend(stages.map(([stage, found]) => [stage, `${count(found)} ${stage}`])));
  text(byId("held"), bytes(memory.held_bytes));
  text(byId("of-budget"), memory.budget_bytes ? `of ${bytes(memory.budget_bytes)} for models` : "held by models, without a limit");
  const parts = [["busy", memory.busy_bytes], ["idle", memory.idle_bytes], ["parked", memory.parked_bytes], ["closing", memory.leaving_bytes]];
  const whole = memory.budget_bytes ?? Math.max(1, memory.held_bytes);
  const told = parts.filter(([, held]) => held > 0).map(([tone, held]) => [tone, `${bytes(held)} ${tone}`]);
  if (memory.resident_bytes) told.push(["unloaded", `process ${bytes(memory.resident_bytes)}`]);
  byId("memory-strip").replaceChildren(strip(parts.map(([tone, held]) => [tone, held / whole])), legend(told));
}

const rows = new Map();
let head = null;

function rowOf(model) {
  const cells = {
    chip: h("span", { class: "chip" }),
    memory: h("span", { class: "meter memory" }),
    rate: h("span", { class: "num", "data-label": "rate" }),
    latency: h("span", { class: "num", "data-label": "latency" }),
    queue: h("span", { class: "num", "data-label": "waiting" }),
    last: h("span", { class: "num muted", "data-label": "last call" }),
    reason: h("span", { class: "reason", hidden: true }),
  };
  const address = `#model/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
  const name = h("span", { class: "name" }, model.name, model.version ? h("small", {}, `v${model.version}`) : "");
  const root = h("a", { class: "model-row", href: address },
    name, cells.chip, cells.memory, cells.rate, cells.latency, cells.queue, cells.last, cells.reason);
  return { root, cells };
}

function showModels() {
  const { models, counts, memory, server } = overview;
  const list = byId("models");
  list.setAttribute("aria-busy", "false");
  const searching = byId("search").value.trim() !== "";
  const shown = new Set(models.map((model) => model.name)).size;
  text(byId("models-note"), shown < counts.matching ? `${count(shown)} of ${count(counts.matching)} shown` : "");
  if (models.length === 0) {
    rows.clear();
    head = null;
    list.replaceChildren(h("p", { class: "empty" }, searching ? "No model's name has that in it." : "The repository has no models yet."));
    return;
  }
  if (!head) {
    head = h("div", { class: "model-head", "aria-hidden": "true" }, h("span", {}, "Model"), h("span", {}, "Stage"), h("span", {}, "Memory"),
      h("span", { class: "num" }, "Requests"), h("span", { class: "num" }, "Latency"), h("span", { class: "num" }, "Waiting"), h("span", { class: "num" }, "Last call"));
    list.replaceChildren(head);
    rows.clear();
  }
  const most = memory.budget_bytes ?? Math.max(1, ...models.map((model) => model.memory_bytes));
  const seen = new Set();
  let before = head;
  for (const model of models) {
    const key = keyOf(model);
    seen.add(key);
    if (!rows.has(key)) rows.set(key, rowOf(model));
    const { root, cells } = rows.get(key);
    text(cells.chip, model.stage);
    attribute(cells.chip, "data-tone", model.stage);
    const latest = history.of(model).latest;
    if (model.memory_bytes > 0) {
      cells.memory.replaceChildren(bytes(model.memory_bytes), strip([[model.stage, Math.max(0.01, model.memory_bytes / most)]]));
    } else cells.memory.replaceChildren("");
    text(cells.rate, latest && latest.rate > 0 ? `${rate(latest.rate)}/s` : "");
    const mean = latest?.latency ?? (model.counters?.success.count ? model.counters.success.ns / model.counters.success.count / 1e6 : null);
    text(cells.latency, mean === null ? "" : millis(mean));
    text(cells.queue, model.queued > 0 ? count(model.queued) : "");
    const last = model.counters?.last_inference_unix_ms;
    text(cells.last, last ? ago(server.now_unix_ms - last) : "");
    const reason = model.stage === "failed" || model.reason?.startsWith("reload failed") ? model.reason : "";
    cells.reason.hidden = !reason;
    text(cells.reason, reason ?? "");
    if (before.nextSibling !== root) before.after(root);
    before = root;
  }
  for (const [key, { root }] of rows) {
    if (!seen.has(key)) { root.remove(); rows.delete(key); }
  }
}

function showDevices() {
  const { devices, memory, server } = overview;
  const used = server.cpu_seconds;
  let share = null;
  if (cpu && used !== null && server.uptime_ms > cpu.at) share = ((used - cpu.used) * 1000) / (server.uptime_ms - cpu.at);
  if (!cpu || server.uptime_ms - cpu.at > 900) cpu = { at: server.uptime_ms, used: used ?? 0 };
  byId("devices").replaceChildren(...devices.map((device) => h("div", { class: "device" },
    h("span", { class: "chip" }, device.kind),
    h("span", {}, device.name, h("span", { class: "muted" }, ` · ${device.cores} ${device.cores === 1 ? "core" : "cores"} · ${device.engine}`)),
    h("span", { class: "muted" }, [
      share === null ? null : `${share < 0.095 ? share.toFixed(2) : share.toFixed(1)} cores in use`,
      memory.budget_bytes ? `budget ${bytes(memory.budget_bytes)}` : null,
    ].filter(Boolean).join(" · ")))));
}

// ---- places: the overview, or a model's version

function place() {
  const [kind, name, version] = location.hash.slice(1).split("/");
  try {
    return kind === "model" && name ? { name: decodeURIComponent(name), version: decodeURIComponent(version ?? "") } : null;
  } catch { return null; }
}

function go() {
  const wanted = place();
  detail?.stop();
  detail = null;
  byId("overview").hidden = wanted !== null;
  byId("detail").hidden = wanted === null;
  if (wanted) {
    detail = new Detail(wanted, {
      explicit: overview?.server.control_mode === "explicit",
      onchange: ask,
      onrefused: (error) => notice(error.message, true),
    });
    byId("detail").replaceChildren(detail.root);
    byId("detail-title").focus({ preventScroll: true });
    scrollTo(0, 0);
  } else byId("detail").replaceChildren();
  ask();
}

// ---- token and theme

function openToken() {
  byId("token").value = token.value;
  byId("token-dialog").showModal();
}

function showToken() {
  text(byId("token-button"), token.value ? "Token set" : "Token");
}

byId("token-button").addEventListener("click", openToken);
byId("token-cancel").addEventListener("click", () => byId("token-dialog").close());
byId("token-clear").addEventListener("click", () => { token.value = ""; showToken(); byId("token-dialog").close(); go(); });
byId("token-form").addEventListener("submit", () => { token.value = byId("token").value.trim(); showToken(); go(); });

function theme() { return document.documentElement.dataset.theme ?? "auto"; }

byId("theme-button").addEventListener("click", () => {
  const next = { auto: "light", light: "dark", dark: "auto" }[theme()];
  if (next === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("dormouse-theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("dormouse-theme", next);
  }
  text(byId("theme-button"), `Theme: ${next}`);
});

let typing = 0;
byId("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(ask, 150); });
addEventListener("keydown", (event) => {
  const inField = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "/" && !inField && !place()) { event.preventDefault(); byId("search").focus(); }
  if (event.key === "Escape" && !inField && place()) location.hash = "";
});
addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });

text(byId("theme-button"), `Theme: ${theme()}`);
showToken();
// The first look tells whether models can be loaded by hand.
await ask();
if (place()) go();
