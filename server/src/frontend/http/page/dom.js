// Elements and figures. Whatever comes from outside becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element; strings among its children are text. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
/** The same for SVG. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

/** Changes an element's text only if it differs, so that what a reader has selected stays. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function attribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** A bar of parts, each `[tone, share]`, shares adding up to at most 1. */
export function strip(parts) {
  let from = 0;
  const bars = parts.filter(([, share]) => share > 0).map(([tone, share]) => {
    const bar = s("rect", { x: `${from * 100}%`, width: `${Math.min(share, 1 - from) * 100}%`, height: "100%", "data-tone": tone });
    from = Math.min(1, from + share);
    return bar;
  });
  return s("svg", { "aria-hidden": "true" }, bars);
}

export const legend = (parts) =>
  h("div", { class: "legend" }, parts.map(([tone, label]) => h("span", { "data-tone": tone }, label)));

const trim = (number, digits) => number.toFixed(digits).replace(/\.?0+$/, "");

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${count >= 100 || unit === 0 ? Math.round(count) : trim(count, 1)} ${units[unit]}`;
}

/** A duration in milliseconds, with as many digits as are worth reading. */
export function millis(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms === 0) return "0 ms";
  if (ms < 0.1) return `${trim(ms * 1000, ms < 0.01 ? 1 : 0)} µs`;
  if (ms < 10) return `${trim(ms, 2)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${trim(ms / 1000, ms < 10000 ? 2 : 1)} s`;
}

export const nanos = (ns) => millis(ns / 1e6);

export function rate(perSecond) {
  if (perSecond === 0) return "0";
  return perSecond < 10 ? trim(perSecond, 1) : Math.round(perSecond).toLocaleString("en");
}

export const count = (number) => number.toLocaleString("en");

export function ago(ms) {
  if (ms < 1500) return "now";
  const steps = [[60e3, 1e3, "s"], [3600e3, 60e3, "min"], [86400e3, 3600e3, "h"], [Infinity, 86400e3, "d"]];
  const [, unit, name] = steps.find(([below]) => ms < below);
  return `${Math.floor(ms / unit)} ${name} ago`;
}
