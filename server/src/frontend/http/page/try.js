// A form made from a model's signature: values in, tensors out, and what the call took.

import { call, modelPath } from "./api.js";
import { count, h, millis } from "./dom.js";
import { bars, fromHeader, kindOf } from "./waterfall.js";

/** Beyond this many values they are made when they are sent instead of being written out. */
const WRITTEN = 256;
/** A request larger than this is no longer something to try by hand. */
const MOST = 4_000_000;
const SHOWN = 96;

const INTEGERS = { INT8: 127, INT16: 1000, INT32: 1000, INT64: 1000, UINT8: 255, UINT16: 1000, UINT32: 1000, UINT64: 1000 };

const MAKERS = {
  random: (type) => {
    if (type === "BOOL") return () => Math.random() < 0.5;
    if (type === "BYTES") return () => Math.random().toString(36).slice(2, 8);
    if (type in INTEGERS) return () => Math.floor(Math.random() * Math.min(100, INTEGERS[type] + 1));
    return () => Math.round((Math.random() * 2 - 1) * 1e4) / 1e4;
  },
  "count up": (type) => {
    if (type === "BOOL") return (index) => index % 2 === 1;
    if (type === "BYTES") return (index) => `text ${index + 1}`;
    return (index) => (type in INTEGERS ? index % (INTEGERS[type] + 1) : index);
  },
  zeros: (type) => {
    if (type === "BOOL") return () => false;
    if (type === "BYTES") return () => "";
    return () => 0;
  },
};

class Input {
  constructor(tensor) {
    this.tensor = tensor;
    this.dims = tensor.shape.map((dim, axis) => (dim >= 0
      ? h("span", { class: "mono" }, String(dim))
      : h("input", { type: "number", min: 0, value: 1, "aria-label": `${tensor.name}, dimension ${axis + 1}`, onchange: () => this.write() })));
    this.how = h("select", { "aria-label": `Values of ${tensor.name}`, onchange: () => this.write() },
      Object.keys(MAKERS).map((name) => h("option", { value: name }, name)), h("option", { value: "typed" }, "typed"));
    this.values = h("textarea", { rows: 3, spellcheck: "false", "aria-label": `${tensor.name} as JSON`, oninput: () => { this.how.value = "typed"; } });
    this.note = h("p", { class: "muted" });
    this.root = h("div", { class: "field" },
      h("div", { class: "row" }, h("strong", {}, tensor.name), h("span", { class: "type" }, tensor.datatype),
        h("span", { class: "dims" }, this.dims.flatMap((dim, axis) => (axis ? ["×", dim] : [dim]))),
        h("span", { class: "row end" }, this.how)),
      this.values, this.note);
    this.write();
  }

  get shape() {
    return this.tensor.shape.map((dim, axis) => (dim >= 0 ? dim : Math.max(0, Math.floor(Number(this.dims[axis].value) || 0))));
  }

  get size() { return this.shape.reduce((product, dim) => product * dim, 1); }

  made() {
    const make = MAKERS[this.how.value](this.tensor.datatype);
    return JSON.stringify(Array.from({ length: this.size }, (_, index) => make(index)));
  }

  write() {
    const typed = this.how.value === "typed";
    const large = !typed && this.size > WRITTEN;
    this.values.hidden = large;
    this.note.textContent = large ? `${count(this.size)} values, made when the request is sent` : "";
    this.note.hidden = !large;
    if (!typed && !large) this.values.value = this.made().replaceAll(",", ", ");
  }

  /** The input as JSON text. Typed values are passed on as they stand: numbers here have 53 bits. */
  json() {
    if (this.size > MOST) throw new Error(`${this.tensor.name}: ${count(this.size)} values are too many to try here`);
    let data = this.values.hidden ? this.made() : this.values.value.trim();
    if (!this.values.hidden) {
      if (!data.startsWith("[")) data = `[${data}]`;
      try { JSON.parse(data); } catch (error) { throw new Error(`${this.tensor.name}: ${error.message}`); }
    }
    const head = JSON.stringify({ name: this.tensor.name, datatype: this.tensor.datatype, shape: this.shape });
    return `${head.slice(0, -1)},"data":${data}}`;
  }
}

function summary(output) {
  const numbers = output.data.filter((value) => typeof value === "number");
  if (numbers.length < 2 || numbers.length !== output.data.length) return "";
  let least = 0, most = 0;
  numbers.forEach((value, index) => {
    if (value < numbers[least]) least = index;
    if (value > numbers[most]) most = index;
  });
  return `smallest ${numbers[least]} at ${least} · largest ${numbers[most]} at ${most}`;
}

function outputOf(output) {
  const data = Array.isArray(output.data) ? output.data : [];
  const shown = data.slice(0, SHOWN).map((value) => (typeof value === "string" ? JSON.stringify(value) : String(value)));
  const rest = data.length > SHOWN ? ` … and ${count(data.length - SHOWN)} more` : "";
  return h("div", { class: "output" },
    h("div", { class: "row" }, h("strong", {}, output.name), h("span", { class: "type" }, `${output.datatype} ${output.shape.join("×") || "scalar"}`)),
    h("p", { class: "muted" }, summary({ data })),
    h("pre", { tabindex: 0 }, shown.join(", ") + rest));
}

/** The form for one version of a model; `onanswer` is told of each answer. */
export function tryForm(model, signature, onanswer) {
  const inputs = signature.inputs.map((tensor) => new Input(tensor));
  const result = h("div", { "aria-live": "polite", id: "try-result" });
  const send = h("button", { type: "submit", class: "primary", id: "try-send" }, "Send");
  const form = h("form", { id: "try-form", novalidate: true },
    inputs.length ? inputs.map((input) => input.root) : h("p", { class: "muted" }, "This model takes no inputs."),
    h("div", { class: "row" }, send));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let body;
    try {
      body = `{"inputs":[${inputs.map((input) => input.json()).join(",")}]}`;
    } catch (error) {
      result.replaceChildren(h("p", { class: "verdict problem" }, error.message));
      return;
    }
    send.disabled = true;
    send.textContent = "Waiting…";
    try {
      const answer = await call(`${modelPath(model.name, model.version)}/infer`, { method: "POST", body });
      const timing = answer.headers.get("server-timing");
      const woke = timing ? fromHeader(timing) : null;
      const ends = woke ? woke.stages.filter((stage) => stage.name !== "pack").map((stage) => stage.start_ns + stage.duration_ns) : [];
      result.replaceChildren(
        h("p", { class: "verdict" }, h("b", {}, millis(answer.took)),
          h("span", { class: "chip", "data-tone": woke ? "waking" : "awake" }, woke ? `woke ${kindOf(woke.kind)}` : "was awake"),
          woke ? h("span", { class: "muted" }, `${millis(woke.total_ms)} in the server`) : null),
        woke ? bars(woke.stages, Math.max(1, ...ends)) : "",
        ...answer.data.outputs.map(outputOf));
    } catch (error) {
      result.replaceChildren(h("p", { class: "verdict problem" }, error.message));
    } finally {
      send.disabled = false;
      send.textContent = "Send again";
      onanswer();
    }
  });
  return h("div", {}, form, result);
}
