// A line over the last minutes. Drawn as SVG by hand: one path per series, nothing to load.

import { attribute, h, s, text } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 84;
/** The scale grows with what there is to show, within these bounds. */
const SHORTEST_MS = 60e3;
const LONGEST_MS = 5 * 60e3;

/** The smallest round number above every value. */
function ceiling(values, least) {
  const most = Math.max(least, ...values);
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= most);
}

/**
 * A chart of `series`, each `{ of: point => number | null, label }`, the second one dashed;
 * `format` writes a value, `least` is the lowest top of the scale.
 */
export function chart({ label, series, format, least }) {
  const now = h("p", { class: "now" }, "–");
  const lines = series.map((_, index) => s("path", { class: index ? "line second" : "line" }));
  const area = s("path", { class: "area" });
  const cursor = s("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    s("line", { class: "grid", x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5 }),
    s("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
    area, lines, cursor);
  const top = h("span");
  const keys = series.length > 1
    ? h("span", {}, series.map((one, index) => [h("i", { class: index ? "key second" : "key" }), one.label]))
    : h("span");
  const root = h("div", { class: "chart" }, now, picture, h("div", { class: "axis" }, keys, top));

  let points = [];
  let hovered = null;
  let shownMs = SHORTEST_MS;
  const value = (one, point) => { const found = point ? one.of(point) : null; return found === null ? "–" : format(found); };
  const tell = () => {
    const point = hovered ?? points.at(-1) ?? null;
    const [first, second] = series;
    const parts = [value(first, point)];
    const small = [];
    if (second && point) small.push(`${second.label} ${value(second, point)}`);
    if (hovered) small.push(new Date(hovered.at).toLocaleTimeString());
    now.replaceChildren(parts[0], small.length ? h("small", {}, ` ${small.join(" · ")}`) : "");
    attribute(picture, "aria-label", `${label}: now ${value(first, points.at(-1) ?? null)}`);
  };
  picture.addEventListener("pointermove", (event) => {
    if (points.length === 0) return;
    const box = picture.getBoundingClientRect();
    const at = points.at(-1).at - shownMs * (1 - (event.clientX - box.left) / box.width);
    hovered = points.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best));
    tell();
    draw(points);
  });
  picture.addEventListener("pointerleave", () => { hovered = null; tell(); draw(points); });

  function draw(shown) {
    points = shown;
    const end = points.at(-1)?.at ?? 0;
    shownMs = Math.min(LONGEST_MS, Math.max(SHORTEST_MS, end - (points[0]?.at ?? end)));
    const values = series.flatMap((one) => points.map(one.of)).filter((found) => found !== null);
    const most = ceiling(values, least);
    const x = (point) => WIDTH * (1 - (end - point.at) / shownMs);
    const y = (found) => HEIGHT - 1 - (HEIGHT - 4) * (found / most);
    series.forEach((one, index) => {
      // A moment without a value is bridged: a mean of nothing is not zero.
      const known = points.filter((point) => one.of(point) !== null);
      const path = known.map((point, step) => `${step ? "L" : "M"}${x(point).toFixed(1)} ${y(one.of(point)).toFixed(1)}`).join("");
      // A single point is drawn as a dot.
      attribute(lines[index], "d", known.length === 1 ? `${path}h1.5` : path);
      if (index === 0) {
        attribute(area, "d", known.length > 1 ? `${path}L${x(known.at(-1)).toFixed(1)} ${HEIGHT}L${x(known[0]).toFixed(1)} ${HEIGHT}Z` : "");
      }
    });
    if (hovered) { attribute(cursor, "x1", x(hovered)); attribute(cursor, "x2", x(hovered)); }
    attribute(cursor, "visibility", hovered ? "visible" : "hidden");
    text(top, `${shownMs <= SHORTEST_MS ? "1 min" : `${Math.round(shownMs / 60e3)} min`} · up to ${format(most)}`);
    tell();
  }
  draw([]);
  return { root, draw };
}

export const rateChart = (label, format) =>
  chart({ label, series: [{ of: (point) => point.rate, label: "all" }, { of: (point) => point.failures, label: "failed" }], format, least: 1 });
export const latencyChart = (label, format) =>
  chart({ label, series: [{ of: (point) => point.latency, label: "answer" }, { of: (point) => point.wait, label: "queue" }], format, least: 1 });
export const queueChart = (label, format) =>
  chart({ label, series: [{ of: (point) => point.queued, label: "waiting" }], format, least: 4 });
