// Opens the API page as a newcomer does: /docs, with Authorize, then the first examples of each operation by "Try it out".
// node docs_page.mjs <node_modules> <chromium> <url> <key> <examples an operation> <operation id>...
// It prints what it saw as one JSON object.
import { createRequire } from "node:module";
import path from "node:path";

const [modules, executablePath, url, key, most, ...operations] = process.argv.slice(2);
const { chromium } = createRequire(path.join(path.resolve(modules), "x.js"))("playwright-core");

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 900, height: 500 } });
page.setDefaultTimeout(20_000);
const seen = { hosts: new Set(), faults: [], tried: [] };
page.on("request", (request) => seen.hosts.add(new URL(request.url()).host));
page.on("pageerror", (error) => seen.faults.push(String(error)));

async function execute(block) {
  const answer = page.waitForResponse((found) => found.request().method() === "POST");
  await block.locator("button.execute").click();
  const status = (await answer).status();
  const shown = block.locator(".live-responses-table .response-col_status", { hasText: String(status) });
  await shown.first().waitFor();
  return status;
}

async function authorize() {
  await page.locator(".auth-wrapper > button.authorize").click();
  const form = page.locator(".auth-container form", { has: page.locator("#auth-bearer-value") });
  await form.locator("#auth-bearer-value").fill(key);
  await form.locator("button.authorize").click();
  await page.locator(".auth-container button.btn-done").first().click();
}

async function open(id) {
  const block = page.locator(`.opblock[id$="-${id}"]`);
  await block.locator(".opblock-summary-control").click();
  await block.locator("button.try-out__btn").click();
  return block;
}

await page.goto(`${url}/docs`, { waitUntil: "load" });
await page.locator(".opblock").first().waitFor();
seen.title = await page.locator(".info .title").innerText();
seen.tags = await page.locator(".opblock-tag-section").count();
for (const id of operations) {
  const block = await open(id);
  if (id === operations[0]) {
    seen.without_key = await execute(block);
    await authorize();
  }
  const choice = block.locator(".opblock-section-request-body .examples-select-element");
  const names = await choice.locator("option").evaluateAll((options) => options.map((option) => option.value));
  for (const name of names.slice(0, Number(most))) {
    await choice.selectOption(name);
    seen.tried.push({ id, name, status: await execute(block) });
  }
  await block.locator(".opblock-summary-control").click(); // what is open is rendered anew at each step
}
await browser.close();
console.log(JSON.stringify({ ...seen, hosts: [...seen.hosts] }));
