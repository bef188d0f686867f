// One version of a model: what it did, how it woke, and a form to try it.

import { call, modelPath } from "./api.js";
import { latencyChart, queueChart, rateChart } from "./chart.js";
import { attribute, bytes, count, h, millis, rate, text } from "./dom.js";
import { tryForm } from "./try.js";
import { waterfall } from "./waterfall.js";

const shape = (tensor) => `${tensor.datatype} ${tensor.shape.map((dim) => (dim < 0 ? "?" : dim)).join("×") || "scalar"}`;

export class Detail {
  #wakes = null;
  #asked = 0;
  #stopped = false;
  /** Cold starts that a visitor opened or closed. */
  #toggled = new Map();

  constructor(model, { explicit, onchange, onrefused }) {
    this.model = model;
    this.onchange = onchange;
    this.onrefused = onrefused;
    this.chip = h("span", { class: "chip" });
    this.facts = h("span", { class: "muted" });
    this.problem = h("p", { class: "problem", role: "alert" });
    this.charts = [
      ["Requests per second", rateChart("Requests per second", rate)],
      ["Latency, mean", latencyChart("Mean latency", millis)],
      ["Waiting", queueChart("Waiting requests", count)],
    ];
    this.form = h("div", { class: "card-body" }, h("p", { class: "muted" }, "Reading its signature…"));
    this.colds = h("div", { class: "card-body", id: "cold-starts" }, h("p", { class: "muted" }, "Asking…"));
    this.signature = h("p", { class: "muted" });
    const title = model.version ? `${model.name}` : model.name;
    const actions = explicit
      ? h("span", { class: "actions" },
          h("button", { type: "button", id: "load", onclick: (event) => this.#control("load", event.target) }, "Load"),
          h("button", { type: "button", id: "unload", onclick: (event) => this.#control("unload", event.target) }, "Unload"))
      : h("span", { class: "actions muted" }, "wakes when it is called");
    this.root = h("div", {},
      h("div", { class: "detail-head" },
        h("a", { class: "back", href: "#" }, "← All models"),
        h("h1", { id: "detail-title", tabindex: -1 }, title),
        model.version ? h("span", { class: "muted" }, `version ${model.version}`) : null,
        this.chip, this.facts, actions),
      this.problem,
      h("section", { class: "card", "aria-label": "Charts" }, h("div", { class: "card-head" }, h("h2", {}, "Last five minutes")),
        h("div", { class: "charts" }, this.charts.map(([name, one]) => h("div", {}, h("h3", {}, name), one.root)))),
      h("div", { class: "split" },
        h("section", { class: "card", "aria-labelledby": "try-title" },
          h("div", { class: "card-head" }, h("h2", { id: "try-title" }, "Try it"), this.signature), this.form),
        h("section", { class: "card", "aria-labelledby": "cold-title" },
          h("div", { class: "card-head" }, h("h2", { id: "cold-title" }, "Cold starts"), h("p", { class: "muted" }, "the last sixteen")), this.colds)));
    this.#describe();
  }

  stop() { this.#stopped = true; }

  async #describe() {
    try {
      const { data } = await call(modelPath(this.model.name, this.model.version));
      if (this.#stopped) return;
      text(this.signature, `gives ${data.outputs.map((output) => `${output.name} ${shape(output)}`).join(", ")}`);
      this.form.replaceChildren(tryForm(this.model, data, () => { this.#wakes = null; this.onchange(); }));
    } catch (error) {
      if (this.#stopped) return;
      if (error.isRefusal) this.onrefused(error);
      this.form.replaceChildren(h("p", { class: "muted" }, error.message));
    }
  }

  async #control(action, button) {
    text(this.problem, "");
    const label = button.textContent;
    button.disabled = true;
    button.textContent = action === "load" ? "Loading…" : "Unloading…";
    try {
      await call(`v2/repository/models/${encodeURIComponent(this.model.name)}/${action}`, { method: "POST", body: "{}" });
      this.#wakes = null;
      if (action === "load") this.#describe();
    } catch (error) {
      text(this.problem, error.message);
      if (error.isRefusal) this.onrefused(error);
    } finally {
      button.disabled = false;
      button.textContent = label;
      this.onchange();
    }
  }

  /** Shows what the server said of this version last; none when it said nothing. */
  update(model, series, now) {
    if (!model) {
      text(this.chip, "not there");
      attribute(this.chip, "data-tone", "unloaded");
      return;
    }
    text(this.chip, model.stage);
    attribute(this.chip, "data-tone", model.stage);
    const counters = model.counters;
    const facts = [];
    if (model.memory_bytes > 0) facts.push(bytes(model.memory_bytes));
    if (counters) facts.push(`${count(counters.success.count)} answered`, `${count(counters.fail.count)} failed`, `woke ${count(counters.cold_starts)}×`);
    text(this.facts, facts.join(" · "));
    if (model.stage === "failed" && model.reason) text(this.problem, model.reason);
    for (const [, one] of this.charts) one.draw(series.points);
    const wakes = counters?.cold_starts ?? 0;
    const changed = wakes !== this.#wakes || model.stage === "waking";
    // Stages in the background go on for a while after the model woke.
    if (changed || (wakes > 0 && now - this.#asked > 5000)) {
      this.#wakes = wakes;
      this.#asked = now;
      if (counters) this.#showColdStarts(now);
      else this.colds.replaceChildren(h("p", { class: "muted" }, "It has not woken since the server started."));
    }
  }

  async #showColdStarts(now) {
    try {
      const { data } = await call(`${modelPath(this.model.name, this.model.version)}/stats`);
      if (this.#stopped) return;
      const colds = (data.model_stats[0]?.cold_starts ?? []).toReversed();
      const drawn = colds.map((cold, index) => {
        const at = cold.started_unix_ns;
        const one = waterfall(cold, now, this.#toggled.get(at) ?? index === 0);
        one.querySelector("summary").addEventListener("click", () => this.#toggled.set(at, !one.open));
        return one;
      });
      this.colds.replaceChildren(...(drawn.length ? drawn : [h("p", { class: "muted" }, "It has not woken since the server started.")]));
    } catch (error) {
      if (!this.#stopped) this.colds.replaceChildren(h("p", { class: "muted" }, error.message));
    }
  }
}
