// Calls to the server that served this page. The token never leaves the tab.

const KEY = "dormouse-token";

export const token = {
  get value() { return sessionStorage.getItem(KEY) ?? ""; },
  set value(text) { text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY); },
};

/** An answer that was none: `status` 0 when the server could not be reached. */
export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
  get isRefusal() { return this.status === 401 || this.status === 403; }
}

function explain(status, text) {
  let said = "";
  try { said = JSON.parse(text).error ?? ""; } catch { /* not ours, or not JSON */ }
  if (status === 401) return said || (token.value ? "The server does not know this token." : "The server asks for a token.");
  if (status === 403) return said || "This token is not allowed to do that.";
  return said || `The server answered ${status}.`;
}

/** Sends a request; resolves with the answer's JSON, its text and headers, and the time it took. */
export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (token.value) headers.authorization = `Bearer ${token.value}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const started = performance.now();
  let response, answer;
  try {
    response = await fetch(path, { method, body, signal, headers, credentials: "omit", cache: "no-store", redirect: "error" });
    answer = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(0, "The server cannot be reached.");
  }
  const took = performance.now() - started;
  if (!response.ok) throw new CallError(response.status, explain(response.status, answer));
  let data = null;
  try { data = answer ? JSON.parse(answer) : null; } catch { throw new CallError(response.status, "The server's answer is not JSON."); }
  return { data, text: answer, headers: response.headers, took };
}

/** The path of a model's version. */
export function modelPath(name, version) {
  const model = `v2/models/${encodeURIComponent(name)}`;
  return version ? `${model}/versions/${encodeURIComponent(version)}` : model;
}
