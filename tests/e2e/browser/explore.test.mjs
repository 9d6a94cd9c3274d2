// The explorer in a real browser, under its own policy: what it shows, its controls, the keyboard, keys, limits, a lost service.
// `make explore-test`; URL= tests the page of a running service instead, without the tests of keys and limits.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import { after, before, describe, test } from "node:test";
import { pathToFileURL } from "node:url";
import { promisify } from "node:util";
import { Browser, keyLine, Origin, ROOT, startService, violations } from "./explorer.mjs";

const ANIMAL = "the animal did not cross the street because it was too tired";
const EXAMPLE = { text: ANIMAL, layer: 3, head: 1, form: "heads", masks: [], row: 9, column: 2 };
const AIM_MS = 1500;
const [KEPT, EXPIRING, NEW, TESTS] = ["a-key-that-stays", "a-key-that-expires", "a-key-that-comes", "the-key-of-the-tests"];
const directory = mkdtempSync(path.join(tmpdir(), "explorer-"));
const keysFile = path.join(directory, "keys");
const running = process.env.URL;
let browser, open, guarded;

function writeKeys(...keys) {
  writeFileSync(`${keysFile}.new`, keys.map(keyLine).join(""));
  renameSync(`${keysFile}.new`, keysFile);
}

before(async () => {
  writeKeys(KEPT, EXPIRING, TESTS);
  [browser, open, guarded] = await Promise.all([
    Browser.launch(),
    running ? { url: running, stop() {} } : startService({ workers: 1 }),
    running ? { stop() {} } : startService({ workers: 1, api_keys_file: keysFile, rate_limit_per_s: 0.25, rate_burst: 40 }),
  ]);
  await api(open, EXAMPLE); // as `make run` asks once, so that the first picture does not wait for the model to be read
});

after(async () => {
  await Promise.all([browser?.close(), open?.stop(), guarded?.stop()]);
  rmSync(directory, { recursive: true });
});

const stories = [];

/** A test on a page of its own, which opens with the first example. Whatever it does, the page causes no fault, asks its own origin
 * alone, and sends neither its fragment nor its address. */
function story(title, { on = "open", prefix = "", at = "/explore", ...looks }, tell) {
  const options = { timeout: 60_000, skip: running && on === "guarded" ? "URL= has no keys" : false };
  stories.push([title, options, async (t) => {
    const origin = await new Origin(on === "open" ? open : guarded, prefix).open();
    const { page, seen, close } = await browser.page(looks);
    const home = `${origin.url}${prefix}`;
    try {
      await page.goto(home + at);
      await tell({ page, origin, home, t });
      assert.deepEqual(seen.faults, []);
      assert.deepEqual(seen.urls.filter((url) => !url.startsWith(`${home}/`) && !/^(data|blob):/.test(url)), []);
      for (const { url, headers } of origin.requests) {
        assert.doesNotMatch(decodeURIComponent(url), /[#?]|animal/);
        assert.equal(headers.referer, undefined);
      }
    } catch (error) {
      t.diagnostic(JSON.stringify({ url: page.url(), problem: await page.locator("#problem, #figure").allInnerTexts(), faults: seen.faults }));
      throw error;
    } finally {
      await close();
      await origin.lose();
    }
  }]);
}

const figureOf = (page) => page.locator("#figure");
const ROLES = ["combobox", "textbox", "checkbox", "spinbutton"];
const field = (page, name) => ROLES.map((role) => page.getByRole(role, { name, exact: true })).reduce((all, next) => all.or(next));
const problemOf = (page) => page.locator("#problem");
const press = (page, name) => page.getByRole("button", { name, exact: true }).click();

/** The first picture stands, and the heads of all layers. */
async function opened(page) {
  await figureOf(page).filter({ hasText: "0.653" }).waitFor();
  await page.locator("#layer-5-11").waitFor();
}

/** The side of the page's address that is drawn: `a`, or `b` of a comparison. */
function sideOf(page, which) {
  const fields = new URLSearchParams(new URL(page.url()).hash.slice(1));
  const get = (name) => fields.get((which === "b" ? "b." : "") + name);
  return {
    text: get("text") ?? ANIMAL, pair: get("pair"), layer: Number(get("layer") ?? 3), head: Number(get("head") ?? 1),
    form: get("form") ?? "heads", masks: JSON.parse(get("masks") ?? "[]"), row: Number(fields.get("row") ?? 9), column: Number(fields.get("column") ?? 2),
  };
}

/** What the API answers of a side: its figure at the side's cell, and the tokens. */
async function api(service, { text, pair, layer, head, form, masks, row, column }) {
  const answer = await fetch(`${service.url}/v1/models/minilm/attend`, {
    method: "POST", headers: { "content-type": "application/json", authorization: `Bearer ${TESTS}` },
    body: JSON.stringify({ text, ...(pair ? { text_pair: pair } : {}), layer, masks, weights: { form, heads: [head] } }),
  });
  const { tokens, weights, ...rest } = await answer.json();
  assert.equal(answer.status, 200, JSON.stringify(rest));
  return { tokens: tokens.map((token) => token.text), value: weights[0][row][column] };
}

/** Waits until the page shows the API's figure of its locked cell, and that the address holds `expected`; returns the figure. */
async function agrees(page, expected, { service = open, which = "a" } = {}) {
  await page.waitForFunction((part) => location.hash.includes(part), new URLSearchParams(expected).toString());
  const side = sideOf(page, which);
  const { tokens, value } = await api(service, side);
  const written = Math.abs(value) < 0.0005 ? value.toExponential(1) : value.toFixed(3);
  await figureOf(page).filter({ hasText: `${tokens[side.row]} → ${tokens[side.column]} ${written.replaceAll("-", "−")}` }).waitFor();
  return value;
}

story("the first picture is the API's figure: from it to animal 0.653", {}, async ({ page, t }) => {
  await figureOf(page).filter({ hasText: "0.653" }).waitFor();
  const stood = await page.evaluate(() => performance.now());
  t.diagnostic(`the first picture stood ${Math.round(stood)} ms after opening (aim: ${AIM_MS})`);
  const { tokens, value } = await api(open, sideOf(page));
  assert.equal(value.toFixed(3), "0.653");
  assert.equal(await figureOf(page).innerText(), `${tokens[9]} → ${tokens[2]} 0.653`);
  assert.deepEqual([tokens[9], tokens[2]], ["it", "animal"]);
});

story("a browser that opens the root below a prefix is led to the page, and all of it works there", { prefix: "/some/prefix", at: "/" }, async ({ page, home }) => {
  await opened(page);
  assert.equal(page.url().replace(/#.*/, ""), `${home}/explore`);
  await field(page, "Layer").selectOption("2");
  await agrees(page, { layer: 2 });
});

story("layer, head, figures and examples change the picture to the API's figure, and Back goes back", {}, async ({ page }) => {
  await opened(page);
  await field(page, "Layer").selectOption("1");
  await agrees(page, { layer: 1 });
  await field(page, "Head").selectOption("7");
  await agrees(page, { head: 7 });
  await field(page, "Figures").selectOption("contributions");
  await agrees(page, { form: "contributions" });
  await page.goBack();
  await page.goBack();
  await agrees(page, { layer: 1, head: 1 });
  const examples = await field(page, "Example").locator("option").evaluateAll((options) => options.map(({ value }) => value));
  assert.deepEqual(examples, ["-1", "0", "1", "2", "3", "4", "5"]);
  for (const value of examples.slice(1)) {
    await field(page, "Example").selectOption(value);
    await page.waitForFunction((chosen) => document.querySelector("#example").value === chosen, value);
    await agrees(page, {});
  }
});

story("a sentence and a pair of one's own are shown with the API's figures", {}, async ({ page }) => {
  await opened(page);
  await field(page, "Sentence").fill("the bank of the river");
  await field(page, "Second sentence, optional").fill("money in the bank");
  await press(page, "Show");
  await page.locator("#tokens").getByRole("button", { name: "money" }).click();
  await figureOf(page).filter({ hasText: /money → / }).waitFor();
  const { pair, text } = sideOf(page);
  assert.deepEqual([text, pair], ["the bank of the river", "money in the bank"]);
  await page.locator("#matrix canvas").last().click({ position: { x: 200, y: 200 } });
  await agrees(page, {});
});

story("markup, right-to-left and combining text, emoji and control characters are drawn as text", {}, async ({ page }) => {
  await opened(page);
  for (const text of ["<img src=x onerror=alert(1)>", "שלום עולם", "e\u0301te\u0301 👩‍👩‍👧 naïve", "a\u202eb\u0000c\u001b[2J"]) {
    await field(page, "Sentence").fill(text);
    await press(page, "Show");
    const { tokens } = await api(open, { ...sideOf(page), text, row: 0, column: 0 });
    await page.waitForFunction((names) => [...document.querySelectorAll("#tokens bdi")].map((found) => found.textContent).join() === names, tokens.join());
    assert.equal(await page.locator("main img").count(), 0);
  }
});

story("an error of the service is shown in its own words with its request id, and the next picture takes it away", {}, async ({ page }) => {
  await opened(page);
  for (const [text, words] of [[" ", /./], ["word ".repeat(600), /602.*512|512.*602/s]]) {
    await field(page, "Sentence").fill(text);
    await press(page, "Show");
    await problemOf(page).filter({ hasText: words }).filter({ hasText: /Request id \S+/ }).waitFor();
  }
  await field(page, "Example").selectOption("0");
  await agrees(page, {});
  assert.equal(await problemOf(page).innerText(), "");
});

story("pointing at or focusing a token shows where it looks and who looks at it; a click holds the row and Escape lets go", {}, async ({ page }) => {
  await opened(page);
  const [animal, it] = ["animal", "it"].map((name) => page.locator("#tokens").getByRole("button", { name: new RegExp(`(^|\\s)${name}(\\s|$)`) }));
  await it.hover();
  await figureOf(page).filter({ hasText: /it → animal 0\.653/ }).waitFor();
  assert.match(await animal.innerText(), /0\.653/);
  assert.ok(await page.locator("#tokens path.looks").count() > 0);
  await page.mouse.move(0, 0);
  await animal.focus();
  await figureOf(page).filter({ hasText: /^animal → / }).waitFor();
  assert.match(await it.innerText(), /0\.653/, "who looks at it");
  await it.click();
  assert.equal(await it.getAttribute("aria-pressed"), "true");
  await page.keyboard.press("Escape");
  assert.equal(await it.getAttribute("aria-pressed"), "false");
});

story("the matrix is read by pointer, locked by a click, and stands as a table behind it", {}, async ({ page }) => {
  await opened(page);
  const matrix = page.locator("#matrix canvas").last();
  const box = await matrix.boundingBox();
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
  await figureOf(page).filter({ hasText: / → \S+ [−\d.e]+$/ }).waitFor();
  await page.mouse.click(box.x + box.width / 2, box.y + box.height / 2);
  await agrees(page, {});
  await page.getByText("The matrix as a table").click();
  const rows = page.locator("#cells tbody tr");
  assert.equal(await rows.count(), 14);
  assert.equal(await rows.nth(9).locator("td").nth(2).innerText(), "0.653");
  assert.equal(await rows.nth(9).locator("th").innerText(), "it");
});

const MASKS = [
  ["causal", {}, { kind: "causal", align: "top_left" }],
  ["causal", { Alignment: "bottom_right" }, { kind: "causal", align: "bottom_right" }],
  ["window", { "Keys before": "8", "Keys after": "1" }, { kind: "window", left: 8, right: 1, align: "top_left" }],
  ["length", { "First keys that are seen": "4" }, { kind: "lengths", values: 4 }],
  ["bias slope", { Slope: "0.25" }, null],
];

story("each kind of mask is tried on the API, said in words, and removed again", {}, async ({ page }) => {
  await opened(page);
  const masks = page.locator("#masks");
  assert.match(await masks.innerText(), /acts on this layer alone/);
  for (const [kind, values, expected] of MASKS) {
    await field(masks, "Mask").selectOption({ label: kind });
    for (const [label, value] of Object.entries(values)) {
      const input = field(masks, label);
      await (label === "Alignment" ? input.selectOption(value) : input.fill(value));
    }
    await press(page, "Add mask");
    await page.waitForFunction(() => location.hash.includes("masks="));
    if (expected) assert.deepEqual(sideOf(page).masks, [expected]);
    await agrees(page, {});
    await masks.getByRole("button", { name: /^Remove/ }).click();
    await agrees(page, {});
    assert.deepEqual(sideOf(page).masks, []);
  }
  await masks.getByRole("button", { name: "street", exact: true }).click();
  assert.ok(await agrees(page, { masks: JSON.stringify(sideOf(page).masks) }) > 0.653);
  await page.locator("#cells, #table").first().waitFor({ state: "attached" });
});

story("A, B and their difference are compared: a mask on one side changes that side alone", {}, async ({ page }) => {
  await opened(page);
  await press(page, "Compare with another");
  await field(page, "Layer").selectOption("2");
  const b = await agrees(page, { "b.layer": 2 }, { which: "b" });
  await page.locator("#view-difference").click();
  const difference = (b - (await api(open, sideOf(page, "a"))).value).toFixed(3).replace("-", "−");
  await figureOf(page).filter({ hasText: `it → animal ${difference}` }).waitFor();
  await page.locator("#view-a").click();
  await opened(page);
  await press(page, "Swap");
  await agrees(page, { layer: 2 });
  await press(page, "Keep only this");
  await agrees(page, { layer: 2 });
  assert.ok(!page.url().includes("b."));
  await press(page, "Compare with another");
  await field(page, "Sentence").fill("typed for B");
  await page.locator("#view-a").click();
  assert.equal(sideOf(page, "b").text, "typed for B", "what was typed goes to its own side");
});

story("heads and layers stand as thumbnails, are sorted, and chosen by a click", {}, async ({ page }) => {
  await opened(page);
  const thumbs = page.locator("#heads button");
  await thumbs.nth(11).waitFor();
  const order = () => thumbs.evaluateAll((found) => found.map(({ id }) => Number(id.replace("head-", ""))));
  assert.deepEqual(await order(), [...Array(12).keys()]);
  for (const sort of ["entropy", "previous", "next", "special"]) {
    await field(page, "Sort by").selectOption(sort);
    assert.deepEqual((await order()).sort((a, b) => a - b), [...Array(12).keys()]);
    assert.match(await thumbs.first().innerText(), /nats[^]*(previous|next) \d+%[^]*\[SEP\] \d+%/);
  }
  await page.locator("#head-5").click();
  await agrees(page, { head: 5 });
  await page.locator("#layer-5-11").click();
  await agrees(page, { layer: 5, head: 11 });
});

story("special tokens are hidden, not masked: no figure changes", {}, async ({ page }) => {
  await opened(page);
  await field(page, "Hide special tokens").check();
  await page.waitForFunction(() => !document.querySelector("#tokens").innerText.includes("[CLS]"));
  await opened(page);
  assert.match(await page.locator("#display").innerText(), /nothing is renormalised/);
});

story("the arithmetic of a cell adds up in the figures that it shows", {}, async ({ page }) => {
  await opened(page);
  const lines = page.locator("#arithmetic tr");
  await lines.last().filter({ hasText: "0.653" }).waitFor();
  const shown = Object.fromEntries(await lines.evaluateAll((rows) => rows.map((row) => [row.querySelector("th").innerText, row.querySelector(".figure").innerText])));
  const number = (name) => Number(shown[name].replace("−", "-"));
  assert.equal((number("exp(score)") / number("the row's sum of exp")).toPrecision(3), shown.weight);
  assert.equal((number("scaled score") + number("masks add")).toFixed(4), number("score").toFixed(4));
});

story("the picture is taken along as a command and a program that work, as HTML, PNG, SVG and CSV", {}, async ({ page, t }) => {
  await opened(page);
  const printed = [];
  for (const [kind, program] of [["curl", "bash"], ["Python", `${ROOT}.venv/bin/python`]]) {
    await press(page, `Copy as ${kind}`);
    await page.getByText("Copied.").waitFor();
    const { stdout } = await promisify(execFile)(program, ["-c", await page.evaluate(() => navigator.clipboard.readText())]);
    printed.push(stdout);
  }
  assert.equal(JSON.parse(printed[0]).weights[0][9][2].toFixed(3), "0.653");
  assert.match(printed[1], /6\.528\d*e-01|0\.6528/);
  const saved = {};
  for (const ending of ["HTML", "PNG", "SVG", "CSV"]) {
    const [download] = await Promise.all([page.waitForEvent("download"), press(page, `Save ${ending}`)]);
    saved[ending] = path.join(directory, download.suggestedFilename());
    await download.saveAs(saved[ending]);
  }
  const [name, , , animal] = readFileSync(saved.CSV, "utf8").split("\r\n")[10].split(",");
  assert.deepEqual([name, Number(animal).toFixed(3)], ['"it"', "0.653"]);
  assert.deepEqual([...readFileSync(saved.PNG).subarray(1, 4)], [..."PNG"].map((letter) => letter.charCodeAt(0)));
  for (const ending of ["HTML", "SVG"]) {
    const other = await browser.page();
    await other.page.goto(pathToFileURL(saved[ending]).href);
    assert.ok((await other.page.locator(ending === "HTML" ? "td" : "svg").allTextContents()).some((text) => text.includes(ending === "HTML" ? "0.653" : "animal")));
    assert.deepEqual(other.seen.faults, []);
    await other.close();
  }
});

story("a request of one's own is pasted or dropped for /v1/attention or a layer, rectangular ones with names too", {}, async ({ page }) => {
  await opened(page);
  await page.getByRole("heading", { name: "A request of your own" }).click();
  const body = { query: [[1, 0]], key: [[1, 0], [0, 1]], value: [[1, 2], [3, 4]] };
  await field(page, "Request: paste JSON").fill(JSON.stringify(body));
  await field(page, "Labels of the query rows (optional)").fill("who");
  await field(page, "Labels of the keys (optional)").fill("this that");
  await press(page, "Draw");
  const tokens = page.locator("#tokens");
  await tokens.getByRole("button", { name: "who" }).hover();
  const answer = await fetch(`${open.url}/v1/attention`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...body, weights: "heads" }),
  }).then((found) => found.json());
  await figureOf(page).filter({ hasText: `who → this ${answer.weights[0][0].toFixed(3)}` }).waitFor();
  assert.deepEqual(await field(page, "Head").locator("option").allInnerTexts(), ["0"]);
  const zeros = (...shape) => ({ dtype: "float32", shape, data: Buffer.alloc(4 * shape.reduce((a, b) => a * b)).toString("base64") });
  const batches = { bld: zeros(2, 3, 4), hld: zeros(2, 3, 4), bhld: zeros(2, 1, 3, 4), packed: zeros(2, 3, 4), "bld ": zeros(3, 4) };
  for (const [layout, tensor] of Object.entries(batches)) {
    const of = { query: tensor, key: tensor, value: tensor, ...(layout.trim() === layout && { layout }), ...(layout === "packed" && { num_heads: 2 }) };
    await field(page, "Request: paste JSON").fill(JSON.stringify(of));
    await field(page, "Labels of the query rows (optional)").fill("who");
    await field(page, "Sequence of a batch").fill("0");
    await press(page, "Draw");
    await problemOf(page).filter({ hasText: "There are 1 labels for 3 query rows." }).waitFor();
    await field(page, "Labels of the query rows (optional)").fill("one two three");
    await field(page, "Labels of the keys (optional)").fill("this that other");
    await field(page, "Sequence of a batch").fill("1");
    await press(page, "Draw");
    if (["hld", "bld "].includes(layout)) await problemOf(page).filter({ hasText: "sequences 0 to 0" }).waitFor();
    else await page.waitForFunction(() => !document.querySelector("#problem").innerText && document.querySelectorAll("#tokens bdi").length === 6);
    await field(page, "Labels of the keys (optional)").fill("");
  }
  await field(page, "Sequence of a batch").fill("0");
  const query = Array.from({ length: 3 }, (_, row) => Array.from({ length: 384 }, (_, at) => Math.sin(row * 384 + at)));
  await field(page, "Send to").selectOption("v1/layers/minilm-l3/attend");
  const saved = JSON.stringify({ request: { query, masks: [{ kind: "causal" }] }, labels: ["the", " cat", "sat\n"] });
  await page.locator("#own input[type=file]").setInputFiles({ name: "own.json", mimeType: "application/json", buffer: Buffer.from(saved) });
  await page.getByText("The request is read, with 3 labels.").waitFor();
  await field(page, "Labels of the query rows (optional)").fill("");
  await field(page, "Labels of the keys (optional)").fill("");
  await press(page, "Draw");
  await page.waitForFunction(() => [...document.querySelectorAll("#tokens bdi")].map((found) => found.textContent).join("|") === "the| cat|sat\n");
  await press(page, "Back to a sentence");
  await page.waitForFunction(() => document.querySelectorAll("#tokens bdi").length === 14);
});

story("without a model the page says how to import one, and still draws a request of one's own", {}, async ({ page, origin }) => {
  await opened(page);
  origin.answers["/v1/models"] = { models: [] };
  await page.reload();
  await problemOf(page).filter({ hasText: "attention-service models import" }).waitFor();
  await field(page, "Request: paste JSON").fill(JSON.stringify({ query: [[1, 0]], key: [[1, 0], [0, 1]], value: [[1, 2], [3, 4]] }));
  await press(page, "Draw");
  await page.locator("#tokens").getByRole("button").last().waitFor();
  assert.equal(await problemOf(page).innerText(), "");
});

story("above 128 tokens one head is asked for at a time, in float16 safetensors where all are", {}, async ({ page, origin }) => {
  await opened(page);
  const before = origin.requests.length;
  await field(page, "Sentence").fill(ANIMAL.repeat(16).slice(0, 64 * 14));
  await press(page, "Show");
  const draws = page.locator("#heads-draw");
  await draws.waitFor();
  const asked = () => origin.requests.slice(before).filter(({ method }) => method === "POST").map(({ body }) => JSON.parse(body).weights);
  assert.deepEqual(asked().map(({ heads }) => heads), [[1]]);
  await draws.click();
  await page.locator("#head-11").waitFor();
  assert.deepEqual([asked().at(-1).heads, asked().at(-1).dtype], [undefined, "float16"]);
});

story("an address opens the picture that it holds, and a spoilt one still opens a page", {}, async ({ page, home }) => {
  await page.goto(`${home}/explore#${new URLSearchParams({ text: "one two three", layer: 4, head: 2, row: 1, column: 3 })}`);
  await page.reload();
  await agrees(page, { layer: 4 });
  for (const spoilt of ["#text=%00&layer=9999&head=-1", "#masks=[{]&own={}", "#%",
    ...['{"path":"//elsewhere.example/","body":{}}', '{"path":"v1/attention","body":{},"rows":[{"toString":1,"valueOf":1}]}'].map((own) => `#own=${encodeURIComponent(own)}`),
    '#text=a&masks=[{"kind":"causal","offset":{"toString":1,"valueOf":1}}]']) {
    await page.goto(`${home}/explore${spoilt}`);
    await page.reload();
    await page.waitForFunction(() => document.querySelector("#figure")?.innerText || document.querySelector("#problem")?.innerText);
  }
});

story("waiting shows that it waits, and what is typed meanwhile stays", {}, async ({ page, origin }) => {
  await opened(page);
  await page.route("**/v1/models", async (route) => {
    await field(page, "Sentence").fill("typed meanwhile");
    await route.continue();
  }, { times: 1 });
  await page.reload();
  await opened(page);
  assert.equal(await field(page, "Sentence").inputValue(), "typed meanwhile");
  await page.reload();
  await opened(page);
  const release = origin.hold();
  await field(page, "Layer").selectOption("0");
  await page.locator("#waiting").filter({ hasText: /layer 0/ }).waitFor();
  release();
  await agrees(page, { layer: 0 });
  await page.locator("#waiting").filter({ hasText: /^$/ }).waitFor({ state: "attached" });
  const late = origin.hold();
  await field(page, "Layer").selectOption("1");
  await page.locator("#waiting").filter({ hasText: /layer 1/ }).waitFor();
  const soon = origin.hold();
  await field(page, "Layer").selectOption("4");
  soon();
  await agrees(page, { layer: 4 });
  late();
  await page.waitForLoadState("networkidle");
  await agrees(page, { layer: 4 });
});

story("a lost service is said in words beside the last picture, and the page goes on when it is back", {}, async ({ page, origin }) => {
  await opened(page);
  await origin.lose();
  await field(page, "Layer").selectOption("2");
  await problemOf(page).filter({ hasText: "The service does not answer" }).waitFor();
  await page.getByRole("heading", { name: "Attention explorer" }).waitFor();
  await origin.open(origin.port);
  await press(page, "Try again");
  await agrees(page, { layer: 2 });
  assert.equal(await problemOf(page).innerText(), "");
});

async function useKey(page, key) {
  await page.getByLabel(/^Key, /).fill(key);
  await press(page, "Use");
}

story("without a key, with a wrong one and with one that expires the page asks for a key, and goes on with it", { on: "guarded" }, async ({ page, origin }) => {
  for (const key of ["", "a-wrong-key"]) {
    if (key) await useKey(page, key);
    await problemOf(page).filter({ hasText: "needs a key" }).waitFor();
  }
  await useKey(page, EXPIRING);
  await opened(page);
  writeKeys(KEPT, NEW, TESTS);
  const models = (key) => fetch(`${guarded.url}/v1/models`, { headers: { authorization: `Bearer ${key}` } });
  while ((await models(EXPIRING)).status !== 401) await new Promise((done) => setTimeout(done, 100));
  await field(page, "Layer").selectOption("2");
  await problemOf(page).filter({ hasText: "needs a key" }).waitFor();
  await useKey(page, NEW);
  await agrees(page, { layer: 2 }, { service: guarded });
  const stored = await page.evaluate(() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]);
  assert.deepEqual(stored, [[NEW], [], ""], "in this tab alone");
  assert.ok(!origin.requests.some(({ url, body }) => `${url}${body}`.includes(NEW)));
});

story("a rate limit is shown in the service's words with the time to wait, and then the page goes on", { on: "guarded" }, async ({ page }) => {
  await useKey(page, KEPT);
  await opened(page);
  const spend = () => fetch(`${guarded.url}/v1/models`, { headers: { authorization: `Bearer ${KEPT}` } });
  while ((await spend()).status !== 429);
  await field(page, "Layer").selectOption("2");
  const words = problemOf(page).filter({ hasText: /requests a second/ }).filter({ hasText: /wait \d+ s/ });
  const [, seconds] = /wait (\d+) s/.exec(await words.innerText());
  await new Promise((done) => setTimeout(done, Number(seconds) * 1000));
  await press(page, "Try again");
  await agrees(page, { layer: 2 }, { service: guarded });
});

/** Presses Tab until the element has the focus. */
async function tabTo(page, target) {
  for (let presses = 0; presses < 80; presses++) {
    if (await target.evaluate((element) => element === document.activeElement)) return;
    await page.keyboard.press("Tab");
  }
  assert.fail("no number of Tabs leads there");
}

story("the keyboard alone asks, chooses, walks tokens and cells, locks and unlocks", {}, async ({ page }) => {
  await opened(page);
  await tabTo(page, field(page, "Sentence"));
  await page.keyboard.press("Control+A");
  await page.keyboard.type("the cat sat");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll("#tokens bdi").length === 5);
  await tabTo(page, field(page, "Layer"));
  await page.keyboard.press("ArrowUp");
  await page.waitForFunction(() => location.hash.includes("layer=2"));
  await tabTo(page, page.locator("#tokens button").first());
  await page.keyboard.press("ArrowRight");
  await figureOf(page).filter({ hasText: /^the → / }).waitFor();
  const matrix = page.getByRole("application");
  await tabTo(page, matrix);
  for (const key of ["ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "Enter"]) await page.keyboard.press(key);
  await page.waitForFunction(() => location.hash.includes("row="));
  await agrees(page, { layer: 2 });
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => !location.hash.includes("row="));
  await tabTo(page, page.locator("#head-0"));
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => location.hash.includes("head=0"));
  assert.equal(await page.evaluate(() => document.activeElement.id), "head-0", "a new picture leaves the focus where it was");
});

for (const [width, colorScheme] of [[360, "dark"], [1600, "light"]]) {
  story(`at ${width} px in ${colorScheme} colours nothing is cut off and axe-core finds no violation`, { width, colorScheme }, async ({ page }) => {
    await opened(page);
    for (const details of await page.locator("details").all()) await details.evaluate((found) => { found.open = true; });
    await press(page, "Compare with another");
    await page.locator("#view-difference").click();
    await page.locator("#layer-5-11").waitFor();
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth), 0);
    assert.deepEqual(await violations(page), []);
  });
}

story("a picture of the page is written for the docs if it is asked for", { height: 1200 }, async ({ page, t }) => {
  if (!process.env.SCREENSHOT) return t.skip("SCREENSHOT=1 writes docs/explore.png");
  await opened(page);
  await page.locator("#head-11").waitFor();
  await page.screenshot({ path: `${ROOT}docs/explore.png` });
});

test(...stories.shift()); // alone, since it takes the time
describe("the explorer", { concurrency: 2 }, () => {
  for (const told of stories) test(...told);
});
