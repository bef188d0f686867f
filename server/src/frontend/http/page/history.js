// What counters became between two looks at them: rates and means, for as long as the page is open.

const KEPT_MS = 5 * 60e3;

class Series {
  points = [];
  #last = null;

  add(at, counters, queued) {
    const last = this.#last;
    this.#last = { at, ...counters };
    if (!last) return;
    const seconds = (at - last.at) / 1000;
    if (seconds <= 0) return;
    // Counters begin anew when the server does.
    const since = (name, of) => Math.max(0, counters[name][of] - last[name][of]);
    const answered = since("success", "count");
    const mean = (name) => (answered > 0 ? since(name, "ns") / answered / 1e6 : null);
    this.points.push({
      at, queued,
      rate: (answered + since("fail", "count")) / seconds,
      failures: since("fail", "count") / seconds,
      latency: mean("success"), wait: mean("queue"), compute: mean("compute"),
    });
    while (this.points.length > 0 && this.points[0].at < at - KEPT_MS) this.points.shift();
  }

  get latest() { return this.points.at(-1) ?? null; }
}

const NOTHING = { count: 0, ns: 0 };
const EMPTY = { success: NOTHING, fail: NOTHING, queue: NOTHING, compute: NOTHING };

export const keyOf = (model) => `${model.name}\n${model.version}`;

export class History {
  all = new Series();
  #models = new Map();

  add(overview) {
    const at = overview.server.now_unix_ms;
    this.all.add(at, overview.totals, overview.load.queued);
    for (const model of overview.models) {
      if (!model.counters && !this.#models.has(keyOf(model))) continue;
      this.of(model).add(at, model.counters ?? EMPTY, model.queued);
    }
  }

  of(model) {
    const key = keyOf(model);
    if (!this.#models.has(key)) this.#models.set(key, new Series());
    return this.#models.get(key);
  }
}
