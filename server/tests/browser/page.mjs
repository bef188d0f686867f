// The page in a real browser: what a visitor sees, types and gets told.
//
//   node page.mjs --url http://127.0.0.1:8000/ --modules DIR [--chromium FILE]      checks everything
//   node page.mjs --runner TOKEN --manager TOKEN --url … --modules DIR              of a server that asks for tokens
//   node page.mjs --shots DIR --model NAME --url … --modules DIR                    takes pictures instead
//
// `--modules` is a folder in which `npm install playwright-core` was run.

import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";

const { values: options } = parseArgs({
  options: {
    url: { type: "string" },
    modules: { type: "string" },
    chromium: { type: "string", default: "/usr/bin/chromium" },
    shots: { type: "string" },
    model: { type: "string", default: "sleepy" },
    runner: { type: "string" },
    manager: { type: "string" },
  },
});
const require = createRequire(resolve(options.modules, "package.json"));
const { chromium } = require("playwright-core");

const FLAGS = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];
const DESK = { width: 1280, height: 860 };
const PHONE = { width: 390, height: 844 };
const PATIENCE = 60_000;

const profile = await mkdtemp(join(tmpdir(), "dormouse-chromium-"));
const context = await chromium.launchPersistentContext(profile, {
  executablePath: options.chromium, args: FLAGS, viewport: DESK, colorScheme: "light", reducedMotion: "reduce",
});
context.setDefaultTimeout(PATIENCE);
const page = context.pages()[0] ?? (await context.newPage());

const complaints = [];
const expected = [];
page.on("console", (message) => {
  if (message.type() === "error" || message.type() === "warning") {
    const text = message.text();
    if (!expected.some((pattern) => pattern.test(text))) complaints.push(text);
  }
});
page.on("pageerror", (error) => complaints.push(String(error)));
page.on("request", (request) => {
  if (new URL(request.url()).origin !== new URL(options.url).origin) complaints.push(`asked ${request.url()}`);
});

const row = (name) => page.locator(".model-row", { has: page.locator(".name", { hasText: new RegExp(`^${name}`) }) });
const stage = (name) => row(name).locator(".chip");
const until = (locator, text) => locator.filter({ hasText: text }).first().waitFor();

async function open(path = "") {
  await page.goto(options.url + path);
  await until(page.locator("#health"), "ready");
}

async function overflow() {
  return page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
}

const checks = {
  async "models are listed with their stage and live memory"() {
    await open();
    await until(stage("simple"), "awake");
    await until(row("simple").locator(".memory"), "MiB");
    await until(stage("broken"), "failed");
    assert.match(await row("broken").locator(".reason").innerText(), /\S/);
    assert.match(await page.locator("#of-models").innerText(), /of \d+ models/);
    assert.match(await page.locator("#of-budget").innerText(), /MiB|GiB/);
    assert.match(await page.locator("#devices").innerText(), /CPU[\s\S]*core/);
  },

  async "search finds models and says when there are none"() {
    await page.keyboard.press("/");
    await page.keyboard.type("simp");
    await page.waitForFunction(() => document.querySelectorAll(".model-row").length === 1);
    await page.keyboard.type("zzz");
    await until(page.locator("#models .empty"), "No model's name");
    await page.locator("#search").fill("");
    await until(stage("simple"), "awake");
  },

  async "a model is tried with its own signature, by keyboard alone"() {
    await row("simple").focus();
    await page.keyboard.press("Enter");
    await page.locator("#try-form").waitFor();
    assert.match(await page.locator("#try-form").innerText(), /INPUT0\s*INT32\s*[\s\S]*16/);
    const ramp = Array.from({ length: 16 }, (_, index) => index + 1);
    await page.getByLabel("INPUT0 as JSON").fill(ramp.join(", "));
    await page.getByLabel("INPUT1 as JSON").fill(`[${ramp.map(() => 1).join(",")}]`);
    await page.locator("#try-send").focus();
    await page.keyboard.press("Enter");
    await until(page.locator("#try-result .verdict"), "was awake");
    const outputs = await page.locator("#try-result").innerText();
    assert.match(outputs, /OUTPUT0[\s\S]*2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17/);
    assert.match(outputs, /OUTPUT1[\s\S]*0, 1, 2, 3/);
    await until(page.locator(".detail-head"), "1 answered");
  },

  async "values that are no JSON and shapes that do not fit are told of"() {
    await page.getByLabel("INPUT0 as JSON").fill("[1, 2");
    await page.locator("#try-send").click();
    await until(page.locator("#try-result .problem"), "INPUT0:");
    await page.getByLabel("INPUT0 as JSON").fill("[1, 2]");
    expected.push(/status of 400/);
    await page.locator("#try-send").click();
    await until(page.locator("#try-result .problem"), "INPUT0");
  },

  async "a sleeping model says how it woke"() {
    await page.keyboard.press("Tab");
    await page.goto(`${options.url}#model/sleepy/1`);
    await page.locator("#try-send").click();
    await until(page.locator("#try-result .verdict"), "woke");
    assert.ok((await page.locator("#try-result .falls rect").count()) >= 2);
    await page.locator("#cold-starts .falls rect").first().waitFor();
    const cold = await page.locator("#cold-starts").innerText();
    assert.match(cold, /building the session/);
    assert.match(cold, /first run/);
    await until(page.locator(".detail-head .chip"), /asleep|awake/);
  },

  async "what a model answers is shown as text, never as markup"() {
    const poison = "<img src=x onerror=\"window.poisoned=true\">";
    await page.goto(`${options.url}#model/echo/1`);
    await page.getByLabel("INPUT as JSON").fill(JSON.stringify([poison]));
    await page.locator("#try-send").click();
    await until(page.locator("#try-result pre"), "onerror");
    assert.equal(await page.locator("#try-result img").count(), 0);
    assert.equal(await page.evaluate(() => window.poisoned), undefined);
  },

  async "a model is unloaded and loaded"() {
    await page.goto(`${options.url}#model/simple/1`);
    await page.locator("#unload").click();
    await until(page.locator(".detail-head .chip"), "unloaded");
    await page.locator("#load").click();
    await until(page.locator(".detail-head .chip"), "awake");
    await page.keyboard.press("Escape");
    await until(stage("simple"), "awake");
  },

  async "charts follow what is asked"() {
    await page.goto(`${options.url}#`);
    const drawn = (chart, line) => page.waitForFunction(
      ([chart, line]) => (document.querySelector(`${chart} ${line}`)?.getAttribute("d") ?? "").includes("L"), [chart, line]);
    await drawn("#chart-rate", ".line");
    await page.locator("#chart-rate svg").hover();
    await page.waitForFunction(() => document.querySelector("#chart-rate .cursor").getAttribute("visibility") === "visible");
    // Two requests for a model that runs one at a time: the second waits for as long as we like.
    await page.evaluate(() => {
      const body = JSON.stringify({ inputs: [{ name: "ITERATIONS", datatype: "INT64", shape: [1], data: [100_000_000] }] });
      window.given_up = new AbortController();
      const ask = () => fetch("v2/models/slow/infer", { method: "POST", body, signal: window.given_up.signal }).catch(() => {});
      ask();
      ask();
    });
    const waiting = (pattern) => page.waitForFunction(
      (source) => new RegExp(source).test(document.querySelector("#chart-queue svg").getAttribute("aria-label")), pattern.source);
    await waiting(/now [1-9]/);
    await page.evaluate(() => window.given_up.abort());
    await waiting(/now 0/);
    await drawn("#chart-queue", ".line");
    // A mean needs answers: one between every two looks.
    await page.evaluate(() => {
      const tensor = (name) => ({ name, datatype: "INT32", shape: [1, 16], data: Array(16).fill(1) });
      const body = JSON.stringify({ inputs: [tensor("INPUT0"), tensor("INPUT1")] });
      window.asking = setInterval(() => fetch("v2/models/simple/infer", { method: "POST", body }), 200);
    });
    await drawn("#chart-latency", ".line");
    await drawn("#chart-latency", ".line.second");
    await page.waitForFunction(() => /now [\d.,]+/.test(document.querySelector("#chart-latency svg").getAttribute("aria-label")));
    await page.evaluate(() => clearInterval(window.asking));
  },

  async "a server that is gone is told of, and its return noticed"() {
    expected.push(/ERR_FAILED/);
    await page.route("**/v2/**", (route) => route.abort());
    await until(page.locator("#notice"), "cannot be reached");
    await page.unroute("**/v2/**");
    await until(page.locator("#health"), "ready");
    await page.locator("#notice").waitFor({ state: "hidden" });
  },

  async "an empty repository says so"() {
    await page.route("**/v2/dormouse/overview*", async (route) => {
      const answer = await route.fetch();
      const overview = await answer.json();
      overview.models = [];
      overview.counts = { models: 0, matching: 0, awake: 0 };
      await route.fulfill({ json: overview });
    });
    await until(page.locator("#models .empty"), "no models yet");
    await page.unroute("**/v2/dormouse/overview*");
    await until(stage("simple"), "awake");
  },

  async "light and dark follow the system, or the switch"() {
    const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await background();
    await page.emulateMedia({ colorScheme: "dark" });
    const dark = await background();
    assert.notEqual(light, dark);
    await page.locator("#theme-button").click();
    assert.equal(await background(), light);
    await page.reload();
    await until(page.locator("#theme-button"), "light");
    assert.equal(await background(), light);
    await page.locator("#theme-button").click();
    await page.emulateMedia({ colorScheme: "light" });
    assert.equal(await background(), dark);
    await page.locator("#theme-button").click();
    assert.equal(await background(), light);
  },

  async "a phone needs no scrolling sideways"() {
    await page.setViewportSize(PHONE);
    await open();
    await until(stage("simple"), "awake");
    assert.equal(await overflow(), 0);
    await page.goto(`${options.url}#model/simple/1`);
    await page.locator("#try-form").waitFor();
    assert.equal(await overflow(), 0);
  },
};

async function give(token) {
  await page.locator("#token-button").click();
  await page.locator("#token").fill(token);
  await page.keyboard.press("Enter");
}

// The server has two models, and one token that may run them, another that may load them.
const guardedChecks = {
  async "a token is asked for"() {
    expected.push(/status of 401/, /status of 403/);
    await page.goto(options.url);
    await until(page.locator("#notice"), "needs a credential");
    assert.equal(await page.locator(".model-row").count(), 0);
    await page.locator("#notice button").click();
    await page.locator("#token").fill("some-other-token-0123456789");
    await page.keyboard.press("Enter");
    await until(page.locator("#notice"), "the token is not known");
    assert.equal(await page.locator(".model-row").count(), 0);
  },

  async "who may run models tries one and is told that loading is not for them"() {
    await give(options.runner);
    await until(page.locator("#health"), "ready");
    await page.locator("#notice").waitFor({ state: "hidden" });
    await until(stage("simple"), "awake");
    await page.goto(`${options.url}#model/simple/1`);
    await page.locator("#try-send").click();
    await until(page.locator("#try-result .verdict"), "was awake");
    assert.match(await page.locator("#try-result").innerText(), /OUTPUT0/);
    for (const button of ["#unload", "#load"]) {
      await page.locator(button).click();
      await until(page.locator("#detail .problem"), "lacks the scope for this: management");
      await page.waitForFunction((button) => !document.querySelector(button).disabled, button);
    }
    await until(page.locator(".detail-head .chip"), "awake");
  },

  async "who may load models does, and is told that running them is not for them"() {
    await give(options.manager);
    await page.locator("#try-form").waitFor();
    await page.locator("#unload").click();
    await until(page.locator(".detail-head .chip"), "unloaded");
    await page.locator("#load").click();
    await until(page.locator(".detail-head .chip"), "awake");
    await page.locator("#try-send").click();
    await until(page.locator("#try-result .problem"), "lacks the scope for this: inference");
  },

  async "the token is kept in the tab only, and can be taken back"() {
    const kept = () => page.evaluate(() => JSON.stringify({ ...localStorage }) + document.cookie + location.href);
    assert.equal((await kept()).includes(options.manager), false);
    await page.reload();
    await until(page.locator("#health"), "ready");
    const other = await context.newPage();
    await other.goto(options.url);
    await until(other.locator("#notice"), "needs a credential");
    await other.close();
    await page.locator("#token-button").click();
    await page.locator("#token-clear").click();
    await until(page.locator("#notice"), "needs a credential");
  },
};

async function check() {
  for (const [name, run] of Object.entries(options.manager ? guardedChecks : checks)) {
    const started = performance.now();
    try {
      await run();
    } catch (error) {
      throw new Error(`${name}: ${error.message}`, { cause: error });
    }
    console.log(`ok: ${name} (${Math.round(performance.now() - started)} ms)`);
  }
  assert.deepEqual(complaints, []);
}

async function shoot() {
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme });
    await page.setViewportSize(DESK);
    // In the same document, so that the charts go on.
    await (scheme === "light" ? open() : page.goto(`${options.url}#`));
    await page.waitForTimeout(scheme === "light" ? 50_000 : 3_000);
    await page.screenshot({ path: join(options.shots, `page-${scheme}.png`) });
    await page.goto(`${options.url}#model/${options.model}/1`);
    await page.locator("#try-send").click();
    await page.locator("#try-result .verdict").waitFor();
    await page.locator("#cold-starts .falls").first().waitFor();
    await page.waitForTimeout(2_000);
    await page.screenshot({ path: join(options.shots, `model-${scheme}.png`) });
    await page.setViewportSize(PHONE);
    await page.goto(`${options.url}#`);
    await page.locator(".model-row").first().waitFor();
    await page.screenshot({ path: join(options.shots, `phone-${scheme}.png`) });
  }
}

try {
  await (options.shots ? shoot() : check());
} catch (error) {
  console.error(error.message);
  console.error(await page.locator("body").innerText().catch(() => ""));
  for (const complaint of complaints) console.error("browser:", complaint);
  process.exitCode = 1;
} finally {
  await context.close();
  await rm(profile, { recursive: true, force: true });
}
