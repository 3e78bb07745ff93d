// Clicks through the page in headless Chromium and compares what it shows with what the routes say. See README.md.

import assert from "node:assert/strict";
import fs from "node:fs";
import path from "node:path";
import { after, before, test } from "node:test";
import { parseArgs } from "node:util";
import axe from "axe-core";
import { chromium } from "playwright-core";
import { defaultModels, scratch, serve, writeRun } from "./server.mjs";

const { values: flags } = parseArgs({ options: { model: { type: "string", multiple: true }, runs: { type: "string" }, shots: { type: "string" } } });
const models = flags.model ?? defaultModels();
const runs = path.join(scratch, "runs");
const TITLES = { generate: "Write", fill: "Fill a mask", predict: "Classify", rerank: "Rank", tag: "Tag", answer: "Answer", choose: "Choose", similarity: "Similarity", tokenize: "Tokens", inside: "Inside" };

let server, browser, page, served;
const complaints = [];

before(async () => {
  writeRun(runs, "steady", 60);
  writeRun(runs, "other", 20);
  server = await serve(models, "--runs", runs);
  served = await (await fetch(`${server.address}/models`)).json();
  browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
  page = await opened(server.address, { reducedMotion: "reduce" });
});
after(async () => {
  await browser?.close();
  await server?.stop();
});

/** A page whose every error is kept, and which may talk to its server alone. */
async function opened(address, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const fresh = await context.newPage();
  fresh.setDefaultTimeout(10_000);
  fresh.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  fresh.on("pageerror", (error) => complaints.push(error.stack));
  fresh.on("request", (request) => request.url().startsWith(address) || complaints.push(`fetched ${request.url()}`));
  await fresh.goto(address);
  return fresh;
}

const able = (ability) => served.find(({ abilities }) => abilities.includes(ability));

async function ask(model, route, body) {
  const response = await fetch(`${server.address}/models/${model.model_id}${route}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  assert.equal(response.status, 200, route);
  return response.json();
}

/** Opens a tab and waits until it has an answer. */
async function open(id, on = page) {
  await on.click(`#tab-${id}`);
  await settled(id, on);
  return on.locator(`#panel-${id}`);
}

async function settled(id, on = page) {
  await on.waitForFunction((panel) => {
    const area = document.getElementById(panel);
    return !area.hidden && !area.querySelector("[aria-busy]") && [...area.querySelectorAll(".answer .result")].every((result) => result.childElementCount > 0);
  }, `panel-${id}`);
}

/** What is done, and the answer that comes of it. */
async function answered(route, work, on = page) {
  const [response] = await Promise.all([on.waitForResponse((response) => response.url().endsWith(route)), work()]);
  const body = await response.json();
  await on.waitForTimeout(80);
  return { body, sent: JSON.parse(response.request().postData() ?? "{}") };
}

const needs = (ability) => ({ skip: () => !able(ability) && `no model can ${ability}` });
function tab(name, ability, work) {
  test(name, async (context) => (needs(ability).skip() ? context.skip(needs(ability).skip()) : work(able(ability))));
}
const percentOf = (text) => (text.includes("<") ? 0.0005 : text.includes(">") ? 0.9995 : Number.parseFloat(text) / 100);
const near = (text, score) => assert.ok(Math.abs(percentOf(text) - score) < 0.0051, `${text} for ${score}`);

test("there is a tab for each thing that the models can do, and for the runs", async () => {
  await page.waitForSelector("[role=tab]");
  const shown = await page.locator("[role=tab]").allTextContents();
  const expected = Object.entries(TITLES).filter(([ability]) => able(ability)).map(([, title]) => title);
  assert.deepEqual(shown, [...expected, "Runs"]);
});

test("tabs go by arrow keys, and one of them is in the tab order", async () => {
  const tabs = page.locator("[role=tab]");
  const last = (await tabs.count()) - 1;
  await tabs.first().focus();
  const at = () => page.evaluate(() => [...document.querySelectorAll("[role=tab]")].indexOf(document.activeElement));
  for (const [key, expected] of [["ArrowRight", 1], ["ArrowLeft", 0], ["ArrowLeft", last], ["ArrowRight", 0], ["End", last], ["Home", 0]]) {
    await page.keyboard.press(key);
    assert.equal(await at(), expected, key);
    assert.equal(await page.locator("[role=tab][tabindex='0']").count(), 1);
    assert.equal(await tabs.nth(expected).getAttribute("aria-selected"), "true");
    assert.equal(await page.locator("[role=tabpanel]:visible").count(), 1);
  }
  const outline = await tabs.first().evaluate((tab) => getComputedStyle(tab).outlineStyle);
  assert.notEqual(outline, "none", "the focus is seen");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.closest("[role=tabpanel]")?.hidden), false);
});

tab("write: a text that grows, and can be stopped", "generate", async (model) => {
  const panel = await open("write");
  const set = (name, value) => panel.locator(`#write-${name}`).fill(String(value));
  const written = () => panel.locator(".fresh").textContent();
  await set("prompt", "<b>jim</b> said");
  await set("max_tokens", 12);
  await set("temperature", 0.7);
  await panel.locator(".primary").click();
  await settled("write");
  const body = { prompt: "<b>jim</b> said", max_tokens: 12, temperature: 0.7, top_p: 0.95, seed: 1 };
  const { choices: [{ text }], usage } = await ask(model, "/v1/completions", body);
  assert.equal(await written(), text);
  assert.equal(await panel.locator(".written .dim").textContent(), "<b>jim</b> said");
  assert.match(await panel.locator(".status").textContent(), new RegExp(`^${usage.completion_tokens} tokens? · the first after \\d+ ms`));
  await panel.locator("summary", { hasText: "from a shell" }).click();
  assert.deepEqual(JSON.parse((await panel.locator(".command pre").textContent()).match(/-d '(.*)'$/s)[1]).max_tokens, 12);

  // Another seed writes another text; temperature 0 the same one each time.
  await set("seed", 2);
  await panel.locator("#write-prompt").press("Control+Enter");
  await settled("write");
  assert.notEqual(await written(), text);

  // A long text is stopped on its way, and the server stops as well.
  await page.route("**/v1/completions", (route) => route.continue({ postData: JSON.stringify({ ...JSON.parse(route.request().postData()), logit_bias: { 70: 100 } }) }));
  await set("max_tokens", model.max_input_length - 40);
  await panel.locator(".primary").click();
  await page.waitForFunction(() => document.querySelector("#panel-write .fresh")?.textContent.length > 5);
  await panel.getByRole("button", { name: "Stop" }).click();
  await settled("write");
  assert.match(await panel.locator(".status").textContent(), /^Stopped/);
  assert.equal(await panel.getByRole("button", { name: "Stop" }).isDisabled(), true);
  const metric = async () => (await (await fetch(`${server.address}/metrics`)).text()).match(new RegExp(`henson_streams_running\\{model="${model.model_id}"\\} (\\d+)`))[1];
  for (let tries = 0; (await metric()) !== "0"; tries++) {
    assert.ok(tries < 20, "nothing is written for nobody");
    await page.waitForTimeout(50);
  }
  await page.unroute("**/v1/completions");

  // What cannot be is told in words.
  await set("temperature", 7);
  await panel.locator(".primary").click();
  await panel.locator(".problem").waitFor();
  assert.match(await panel.locator(".problem").textContent(), /`temperature` is 7, expected a number from 0 to 2\.$/);
  await set("temperature", 0.7);
  await set("max_tokens", 12);
  await panel.locator(".primary").click();
  await settled("write");
  complaints.splice(0, complaints.length, ...complaints.filter((text) => !text.includes("422")));
});

tab("fill: a click hides a word, another brings it back, guesses go into the text", "fill", async (model) => {
  const panel = await open("fill");
  const text = panel.locator("#fill-text");
  const before = await text.inputValue();
  const [{ masks }] = await ask(model, "/fill", { inputs: before, top: 8 });
  assert.deepEqual(await panel.locator(".bars .label").allTextContents(), masks.flatMap(({ predictions }) => predictions.map(({ token }) => token)));
  near(await panel.locator(".bars .score").first().textContent(), masks[0].predictions[0].probability);

  await text.fill("jim will play the <b>frog</b>, play it.");
  await panel.locator(".primary").click();
  assert.match(await panel.locator(".status").textContent(), /^Nothing is hidden/);
  assert.equal(await panel.locator(".sentence").textContent(), "jim will play the <b>frog</b>, play it.");
  // The second of two equal words.
  const { sent } = await answered("/fill", () => panel.locator(".word", { hasText: "play" }).nth(1).click());
  assert.equal(sent.inputs, `jim will play the <b>frog</b>, ${model.mask_token} it.`);
  assert.match(await panel.locator(".hint", { hasText: "The hidden word" }).textContent(), /“play”/);
  await answered("/fill", () => panel.locator(".word", { hasText: "jim" }).click());
  assert.equal(await panel.locator(".blank").count(), 2);
  assert.equal(await panel.locator(".bars").count(), 2);
  await answered("/fill", () => panel.locator(".blank").nth(1).click());
  assert.equal(await text.inputValue(), `${model.mask_token} will play the <b>frog</b>, play it.`);
  await panel.locator(".blank").click();
  assert.equal(await text.inputValue(), "jim will play the <b>frog</b>, play it.");

  await answered("/fill", () => panel.locator(".chip").first().click());
  const guess = await panel.locator(".bars .label").nth(2).textContent();
  await panel.locator(".bars .label").nth(2).click();
  const put = guess.startsWith("##") ? before.replace(` ${model.mask_token}`, guess.slice(2)) : before.replace(model.mask_token, guess);
  assert.equal(await text.inputValue(), put);
});

tab("classify: a bar for each label", "predict", async (model) => {
  const panel = await open("classify");
  for (const chip of await panel.locator(".chip").all()) {
    const { body } = await answered("/predict", () => chip.click());
    const predictions = Array.isArray(body[0]) ? body[0] : body;
    assert.deepEqual(await panel.locator(".bars .label").allTextContents(), predictions.map(({ label }) => label));
    const shown = await panel.locator(".bars .score").allTextContents();
    predictions.forEach(({ score }, index) => near(shown[index], score));
    const share = await panel.locator(".bar").first().evaluate((bar) => bar.getBoundingClientRect().width / bar.parentElement.getBoundingClientRect().width);
    assert.ok(Math.abs(share - predictions[0].score) < 0.03, `a bar of ${share} for ${predictions[0].score}`);
  }
  assert.equal(await panel.locator(".bars li").count(), Object.keys(model.labels).length);
});

tab("rank: texts in the order of their scores", "rerank", async () => {
  const panel = await open("rank");
  const { body } = await answered("/rerank", () => panel.locator(".primary").click());
  assert.deepEqual(await panel.locator(".bars .label").allTextContents(), body.map(({ text }) => text));
});

tab("choose: a bar for each choice, in their order", "choose", async () => {
  const panel = await open("choose");
  const { body, sent } = await answered("/choose", () => panel.locator(".primary").click());
  assert.deepEqual(await panel.locator(".bars .label").allTextContents(), sent.choices);
  assert.equal(await panel.locator(".bars li").evaluateAll((rows) => rows.findIndex((row) => row.classList.contains("current"))), body.best);
});

tab("tag: entities where they stand", "tag", async (model) => {
  const panel = await open("tag");
  const text = "🐸 Jim Henson <i>played</i> in Zürich, and Kermit in London.";
  await panel.locator("#tag-text").fill(text);
  const { body: [entities] } = await answered("/tag", () => panel.locator("#tag-text").press("Control+Enter"));
  const marks = await panel.locator(".entity").evaluateAll((all) => all.map((mark) => mark.firstChild.textContent));
  assert.deepEqual(marks, entities.map((entity) => entity.text));
  const plain = await panel.locator(".marked").evaluate((passage) => {
    const copy = passage.cloneNode(true);
    copy.querySelectorAll(".kind").forEach((kind) => kind.remove());
    return copy.textContent;
  });
  assert.equal(plain, text);
  const kinds = new Set(Object.values(model.labels).filter((label) => label !== "O").map((label) => label.replace(/^[A-Z]-/, "")));
  assert.ok((await panel.locator(".legend li").count()) >= kinds.size);
});

tab("answer: the span is lit, runners-up can be looked at", "answer", async () => {
  const panel = await open("answer");
  const { body: { answers } } = await answered("/answer", () => panel.locator(".primary").click());
  const found = answers.findIndex(({ start }) => start !== null);
  assert.ok(found >= 0);
  const lit = () => panel.locator(".passage .lit").textContent();
  if (answers[0].start !== null) assert.equal(await lit(), answers[0].text);
  const other = answers.findLastIndex(({ start }) => start !== null);
  await panel.locator(".bars .label").nth(other).click();
  assert.equal(await lit(), answers[other].text);
  assert.equal(await panel.locator(".bars .label").nth(other).evaluate((button) => document.activeElement === button), true);
  assert.equal(await panel.locator(".passage").textContent(), await panel.locator("#answer-context").inputValue());
});

tab("similarity: a heat map of cosines", "similarity", async (model) => {
  const panel = await open("similarity");
  const sentences = (await panel.locator("#similarity-texts").inputValue()).split("\n");
  const vectors = await ask(model, "/embed", { inputs: sentences });
  const cells = await panel.locator(".heat tbody tr").evaluateAll((rows) => rows.map((row) => [...row.querySelectorAll("td")].map((cell) => cell.textContent)));
  assert.equal(cells.length, sentences.length);
  vectors.forEach((a, i) => vectors.forEach((b, j) => {
    const cosine = a.reduce((sum, x, k) => sum + x * b[k], 0);
    if (i !== j) assert.ok(Math.abs(Number(cells[i][j].replace("−", "-")) - cosine) < 0.0051, `${i} ${j}`);
  }));
  await panel.locator(".heat tbody tr").nth(1).locator("td").nth(0).hover();
  assert.ok((await panel.locator(".read-out").textContent()).includes(sentences[1]));
  await panel.locator("#similarity-texts").fill("one");
  await panel.locator(".primary").click();
  assert.match(await panel.locator(".status").textContent(), /at least two/);
});

tab("tokens: with ids and offsets, while typing", "tokenize", async (model) => {
  const panel = await open("tokens");
  const text = "🐸 jim plays puppeteer";
  await answered("/decode", () => panel.locator("#tokens-text").fill(text));
  const [pieces] = await ask(model, "/tokenize", { inputs: text });
  assert.deepEqual(await panel.locator(".cards small").allTextContents(), pieces.map(({ id }) => String(id)));
  assert.equal(await panel.locator(".pieces").textContent(), text);
  await panel.locator("summary", { hasText: "As a table" }).click();
  const places = await panel.locator(".plain tbody tr td:nth-child(4)").allTextContents();
  assert.deepEqual(places, pieces.map(({ start, stop }) => (start === null ? "–" : `${start}–${stop}`)));
});

tab("inside: a map for each head, by mouse and by keys", "inside", async (model) => {
  const panel = await open("inside");
  const text = await panel.locator("#attention-text").inputValue();
  const { tokens, attention } = await ask(model, "/inside/attention", { inputs: text });
  assert.equal(await panel.locator(".head").count(), model.layers * model.heads);
  // Something is painted on each.
  assert.equal(await panel.locator(".head canvas").evaluateAll((all) => all.filter((canvas) => !canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((x) => x > 0)).length), 0);

  // It begins with a head that finds what "it" means.
  if (model.model_id === "minilm") assert.match(await panel.locator(".detail .read-out").textContent(), /^“it” attends to “animal” 6\d %/);

  await panel.locator(".head").first().click();
  assert.match(await panel.locator(".toolbar").textContent(), /Layer 1, head 1/);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowDown");
  assert.match(await panel.locator(".toolbar").textContent(), /Layer 2, head 2/);
  const row = attention[1][1][2];
  await panel.locator(".from li").nth(2).hover();
  const best = row.indexOf(Math.max(...row));
  near(await panel.locator(".to small").nth(best).textContent(), row[best]);
  assert.ok((await panel.locator(".detail .read-out").textContent()).startsWith(`“${tokens[2].text}” attends to`));
  await panel.locator(".from li").first().focus();
  await page.keyboard.press("ArrowDown");
  assert.ok((await panel.locator(".detail .read-out").textContent()).startsWith(`“${tokens[1].text}” attends to`));

  await panel.getByRole("button", { name: "Grid" }).click();
  const canvas = panel.locator(".picture canvas");
  const box = await canvas.boundingBox();
  await page.mouse.move(box.x + (2.5 / tokens.length) * box.width, box.y + (1.5 / tokens.length) * box.height);
  assert.ok((await panel.locator(".detail .read-out").textContent()).includes(`of “${tokens[1].text}” goes to “${tokens[2].text}”`));
  await panel.getByRole("button", { name: "Lines" }).click();
});

tab("inside: the uses of a word, the nearest first", "inside", async (model) => {
  const panel = await open("inside");
  const sentences = (await panel.locator("#neighbours-texts").inputValue()).split("\n");
  const { uses, nearest } = await ask(model, "/inside/neighbours", { word: "play", inputs: sentences });
  const shown = () => panel.locator(".near .bars .label").allTextContents();
  assert.deepEqual(await shown(), nearest[0].map((other) => sentences[uses[other].text]));
  // all-MiniLM-L6-v2 puts plays on a stage beside each other, before children and dogs.
  if (model.model_id === "minilm") assert.match((await shown())[0], /wrote a play/);
  await panel.locator(".near .label").last().click();
  const last = nearest[0].at(-1);
  assert.deepEqual(await shown(), nearest[last].map((other) => sentences[uses[other].text]));
  await panel.locator("#neighbours-word").fill("nowhere");
  await answered("/inside/neighbours", () => panel.locator("#neighbours-word").press("Enter"));
  assert.match(await panel.locator(".problem").textContent(), /None of the texts has the word/);
  complaints.splice(0, complaints.length, ...complaints.filter((text) => !text.includes("422")));
});

test("runs: curves that grow while a run goes on, and samples by step", async () => {
  await page.click("#tab-runs");
  const panel = page.locator("#panel-runs");
  await panel.locator(".curve").first().waitFor();
  assert.deepEqual(await panel.locator(".run-list b").allTextContents(), ["other", "steady"]);
  assert.equal(await panel.locator(".live").count(), 2);
  const about = panel.locator(".run-list li", { hasText: "steady" }).locator("small");
  assert.match(await about.textContent(), /step 60/);
  writeRun(runs, "steady", 20, 61);
  await page.waitForFunction(() => document.querySelector(".run-list").textContent.includes("step 80"), null, { timeout: 6000 });
  await panel.locator(".chart").focus();
  await page.keyboard.press("End");
  assert.match(await panel.locator(".read-out").textContent(), /^step 80: steady [\d.]+, steady held out [\d.]+$/);
  assert.equal(await panel.locator("#sample-run").inputValue(), "steady");
  assert.match(await panel.locator(".samples").textContent(), /jim word80/);
  await panel.locator("#sample-step").focus();
  await page.keyboard.press("ArrowLeft");
  assert.match(await panel.locator(".samples").textContent(), /jim word70/);

  const options = await panel.locator("#run-metric option").allTextContents();
  assert.deepEqual(options, ["Loss", "Masked words' loss", "Learning rate", "Gradient norm", "Tokens a second", "Held-out accuracy", "Held-out perplexity"]);
  await panel.locator("#run-metric").selectOption("held-out perplexity");
  await panel.locator("#run-axis").selectOption("hours");
  await panel.locator("#run-log").check();
  assert.equal(await panel.locator(".dot").count(), 8 + 2);
  await panel.locator("#run-0").uncheck();
  assert.equal(await panel.locator(".dot").count(), 8);

  // A run that goes on from an earlier checkpoint: its log is cut back.
  fs.rmSync(path.join(runs, "steady"), { recursive: true });
  writeRun(runs, "steady", 5);
  await page.waitForFunction(() => document.querySelector(".run-list").textContent.includes("step 5,"), null, { timeout: 6000 });
  assert.equal(await panel.locator(".dot").count(), 0);
  writeRun(runs, "steady", 25, 6);
  await page.waitForFunction(() => document.querySelector(".run-list").textContent.includes("step 30"), null, { timeout: 6000 });
  assert.equal(await panel.locator(".dot").count(), 3);
});

test("every answer can be had from a shell as well", async () => {
  const id = able("fill") ? "fill" : "tokens";
  const panel = await open(id);
  await answered(id === "fill" ? "/fill" : "/decode", () => panel.locator(".chip").first().click());
  await panel.locator("summary", { hasText: "from a shell" }).click();
  const command = await panel.locator(".command pre").textContent();
  assert.ok(command.startsWith(`curl ${server.address}/models/`), command);
  const body = JSON.parse(command.match(/-d '(.*)'$/s)[1].replaceAll("'\\''", "'"));
  assert.equal(typeof body.inputs, "string");
});

test("failures are told in words", async () => {
  const fresh = await opened(server.address);
  const panel = await open("similarity", fresh);
  await fresh.route("**/embed", (route) => route.fulfill({ status: 429, headers: { "Retry-After": "3", "Content-Type": "application/json" }, body: '{"error": "too much waits already", "error_type": "overloaded"}' }));
  await panel.locator(".primary").click();
  await panel.locator(".problem").waitFor();
  assert.equal(await panel.locator(".problem").textContent(), "Too much waits already. Try again in 3 s.");
  await fresh.unroute("**/embed");
  await fresh.route("**/embed", (route) => route.abort());
  await panel.locator(".primary").click();
  await fresh.waitForFunction(() => document.querySelector(".problem")?.textContent.includes("does not answer"));
  await fresh.unroute("**/embed");
  await panel.locator(".primary").click();
  await panel.locator(".heat").waitFor();
  await fresh.context().close();
  complaints.splice(0, complaints.length, ...complaints.filter((text) => !/429|ERR_FAILED/.test(text)));
});

test("a server with a key asks for it", async () => {
  const locked = await serve(models.slice(0, 1), "--api-key", "frog");
  const fresh = await opened(locked.address);
  try {
    await fresh.fill("#key", "toad");
    await fresh.click("text=Enter");
    await fresh.locator(".key #key:focus").waitFor();
    await fresh.fill("#key", "frog");
    await fresh.click("text=Enter");
    await open("tokens", fresh);
    assert.equal(await fresh.locator("#tab-runs").count(), 0, "a server without --runs shows none");
    assert.match(await fresh.locator("#panel-tokens .command pre").textContent(), /Bearer \$HENSON_API_KEY/);
  } finally {
    await fresh.context().close();
    await locked.stop();
  }
  complaints.splice(0, complaints.length, ...complaints.filter((text) => !/401|404/.test(text)));
});

test("dark follows the system, and the switch", async () => {
  const fresh = await opened(server.address, { colorScheme: "dark" });
  const light = () => fresh.evaluate(() => Number(getComputedStyle(document.body).backgroundColor.match(/\d+/)[0]) > 128);
  const toggle = fresh.getByRole("switch");
  assert.equal(await light(), false);
  assert.equal(await toggle.getAttribute("aria-checked"), "true");
  await toggle.click();
  assert.equal(await light(), true);
  await fresh.reload();
  assert.equal(await light(), true);
  assert.equal(await toggle.getAttribute("aria-checked"), "false");
  await toggle.press("Space");
  assert.equal(await light(), false);
  await fresh.emulateMedia({ colorScheme: "light" });
  assert.equal(await light(), true, "it follows the system again");
  await fresh.context().close();
});

for (const [width, scheme] of [[1280, "light"], [1280, "dark"], [360, "light"], [360, "dark"]]) {
  test(`all tabs at ${width} pixels, ${scheme}: nothing sticks out, and axe finds nothing`, async () => {
    const fresh = await opened(server.address, { viewport: { width, height: 800 }, colorScheme: scheme, reducedMotion: "reduce" });
    await fresh.waitForSelector("[role=tab]");
    for (const id of await fresh.locator("[role=tab]").evaluateAll((tabs) => tabs.map((tab) => tab.id.slice(4)))) {
      if (id === "runs") await fresh.click("#tab-runs").then(() => fresh.locator(".curve").first().waitFor());
      else await open(id, fresh);
      assert.equal(await fresh.evaluate(() => document.documentElement.scrollWidth - innerWidth), 0, id);
      await fresh.evaluate(axe.source);
      const { violations } = await fresh.evaluate(() => globalThis.axe.run());
      const found = violations.map(({ id: rule, nodes }) => `${rule}: ${nodes.slice(0, 3).map(({ html, failureSummary }) => `${html.slice(0, 160)} ${failureSummary}`).join("; ")}`);
      assert.deepEqual(found, [], id);
    }
    await fresh.context().close();
  });
}

test("screenshots", { skip: !flags.shots }, async () => {
  fs.mkdirSync(flags.shots, { recursive: true });
  const shown = flags.runs ? await serve(models, "--runs", flags.runs) : server;
  for (const width of [1280, 360]) for (const scheme of ["light", "dark"]) {
    const fresh = await opened(shown.address, { viewport: { width, height: 800 }, colorScheme: scheme, reducedMotion: "reduce" });
    await fresh.waitForSelector("[role=tab]");
    for (const id of await fresh.locator("[role=tab]").evaluateAll((tabs) => tabs.map((tab) => tab.id.slice(4)))) {
      if (id === "runs") await fresh.click("#tab-runs").then(() => fresh.locator(".curve").first().waitFor());
      else await open(id, fresh);
      await fresh.screenshot({ path: path.join(flags.shots, `${id}-${width}-${scheme}.png`), fullPage: true });
    }
    await fresh.context().close();
  }
  if (shown !== server) await shown.stop();
});

test("the browser had nothing to complain about", () => assert.deepEqual(complaints, []));
