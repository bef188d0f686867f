// A cold start as bars at their true places, a row per stage and lane.

import { ago, bytes, h, nanos, s } from "./dom.js";

const TONES = {
  before: "closing", queue: "asleep", "failed-attempt": "failed", "look-up": "parked", read: "io", map: "io", populate: "io",
  environment: "build", session: "build", warmup: "waking", "first-run": "awake", run: "awake", pack: "parked",
};
const NAMES = {
  before: "before the load", queue: "waiting for its turn", "failed-attempt": "failed attempts", "look-up": "look-up", read: "reading files",
  map: "mapping weights", populate: "weights coming in", environment: "engine", session: "building the session",
  warmup: "warm-up", "first-run": "first run", run: "this run", pack: "packing, in the background",
};
const KINDS = { source: "from its files", prepared: "from the prepared store", parked: "from parked" };

export const kindOf = (kind) => KINDS[kind] ?? kind;

function rows(stages) {
  const found = new Map();
  for (const stage of stages) {
    const key = `${stage.name}\n${stage.lane}`;
    if (!found.has(key)) found.set(key, { name: stage.name, bars: [], bytes: 0, took: 0, running: false });
    const row = found.get(key);
    row.bars.push(stage);
    row.bytes += stage.bytes ?? 0;
    row.took += stage.duration_ns;
    row.running ||= stage.running ?? false;
  }
  return [...found.values()];
}

/** The rows of a cold start; `end` is where the scale ends, in nanoseconds. */
export function bars(stages, end) {
  const share = (ns) => `${(100 * Math.min(ns, end)) / end}%`;
  const lines = rows(stages).flatMap((row) => {
    const picture = s("svg", { "aria-hidden": "true" }, row.bars.map((bar) => s("rect", {
      x: share(bar.start_ns), y: "2", height: "10", rx: "2",
      // Even the shortest is to be seen.
      width: `${Math.max(0.6, Math.min(100, (100 * bar.duration_ns) / end))}%`,
      "data-tone": TONES[row.name] ?? "closing",
    })));
    const moved = row.bytes > 0 ? ` · ${bytes(row.bytes)}` : "";
    return [
      h("span", {}, NAMES[row.name] ?? row.name),
      picture,
      h("span", { class: "took" }, `${nanos(row.took)}${row.running ? " so far" : ""}${moved}`),
    ];
  });
  return h("div", { class: "falls" }, lines,
    h("span"), h("span", { class: "ruler" }, h("span", {}, "0"), h("span", {}, nanos(end / 2)), h("span", {}, nanos(end))), h("span"));
}

/** One recorded cold start, closed unless `open`. */
export function waterfall(cold, now, open) {
  const foreground = cold.stages.filter((stage) => stage.name !== "pack");
  const ends = foreground.map((stage) => stage.start_ns + stage.duration_ns);
  const end = Math.max(1, cold.kind === "parked" ? 0 : cold.total_ns, ...ends);
  const answered = cold.stages.filter((stage) => stage.name === "first-run").map((stage) => stage.start_ns + stage.duration_ns);
  const total = answered.length ? Math.max(...answered) : cold.total_ns;
  const saved = cold.overlap_ns > 0 ? `${nanos(cold.overlap_ns)} saved by overlapping` : null;
  const details = h("details", { class: "wake", open },
    h("summary", {},
      h("b", {}, nanos(total)),
      h("span", {}, kindOf(cold.kind), cold.ahead ? ", ahead of a call" : ""),
      h("span", { class: "muted" }, [saved, cold.bytes ? bytes(cold.bytes) : null].filter(Boolean).join(" · ")),
      h("span", { class: "muted when" }, ago(now - cold.started_unix_ns / 1e6))),
    bars(cold.stages, end));
  return details;
}

/** What a `Server-Timing` header tells of a request that woke its model. */
export function fromHeader(value) {
  const entries = value.split(",").map((entry) => {
    const [name, ...parameters] = entry.trim().split(";");
    const read = Object.fromEntries(parameters.map((parameter) => parameter.trim().split("=")));
    return { name, ms: Number(read.dur ?? 0), start: Number(read.start ?? 0), bytes: Number(read.bytes ?? 0), desc: read.desc };
  });
  const one = (name) => entries.find((entry) => entry.name === name);
  const load = one("load");
  if (!load) return null;
  const named = new Set(["load", "wait", "run", "total"]);
  const wait = one("wait")?.ms ?? load.ms;
  const run = one("run")?.ms ?? 0;
  // Stages count from the start of the load, the wait from the request's arrival: whichever was first.
  const before = Math.max(0, wait - load.ms);
  const stages = entries.filter((entry) => !named.has(entry.name)).map((entry) => ({
    name: entry.name, lane: 0, start_ns: (before + entry.start) * 1e6, duration_ns: entry.ms * 1e6, bytes: entry.bytes,
  }));
  if (before > 0) stages.unshift({ name: "before", lane: 0, start_ns: 0, duration_ns: before * 1e6, bytes: 0 });
  stages.push({ name: "run", lane: 0, start_ns: Math.max(wait, load.ms) * 1e6, duration_ns: run * 1e6, bytes: 0 });
  return { kind: load.desc ?? "", total_ms: one("total")?.ms ?? wait + run, stages };
}
