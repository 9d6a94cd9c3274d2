// What the test of the explorer needs: real services, an origin in front of one that can be lost, and pages of one browser.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

export const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const require = createRequire(`${ROOT}.npm-browser/x.js`);
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const WAIT_MS = 10_000;

/** The line of a keys file that admits this key. */
export const keyLine = (key) => `${createHash("sha256").update(key).digest("hex")} infer\n`;

/** Starts `serve` over the layers of `make layers`, and resolves when it is ready. On a busy machine two browsers at once are sustained
 * overload, so its requests may wait. */
export async function startService(settings = {}) {
  const foreign = Object.entries(process.env).filter(([name]) => !name.startsWith("ATTENTION_"));
  const own = { device: "cpu", standing_wait_ms: 0, layers_dir: `${ROOT}.layers`, ...settings };
  const env = Object.fromEntries([...foreign, ...Object.entries(own).map(([name, value]) => [`ATTENTION_${name.toUpperCase()}`, value])]);
  const child = spawn(`${ROOT}.venv/bin/python`, ["-m", "service", "serve", "--port", "0"], {
    cwd: ROOT, env, stdio: ["ignore", "pipe", "inherit"],
  });
  const url = await new Promise((resolve, reject) => {
    child.once("exit", (code) => reject(new Error(`the service ended with ${code}`)));
    createInterface(child.stdout).on("line", (text) => {
      const line = JSON.parse(text);
      if (line.event === "serving") resolve(`http://127.0.0.1:${line.port}`);
    });
  });
  while (!(await fetch(`${url}/readyz`).catch(() => null))?.ok) await new Promise((done) => setTimeout(done, 50));
  return { url, stop: () => Promise.all([once(child, "exit"), child.kill("SIGTERM")]) };
}

/** An origin that hands every request below `prefix` to a service, as a proxy does, and keeps what it received. */
export class Origin {
  requests = [];
  held = Promise.resolve();
  answers = {}; // by path: JSON instead of what the service answers

  constructor(service, prefix = "") {
    [this.service, this.prefix] = [service, prefix];
    this.server = http.createServer((request, response) => this.#forward(request, response));
  }

  async open(port = 0) {
    await once(this.server.listen(port, "127.0.0.1"), "listening");
    this.port = this.server.address().port;
    this.url = `http://127.0.0.1:${this.port}`;
    return this;
  }

  /** From now on nothing listens there, until `open(origin.port)`. */
  async lose() {
    const closed = once(this.server, "close");
    this.server.close();
    this.server.closeAllConnections();
    await closed;
  }

  /** Keeps requests waiting, until what it returns is called. */
  hold() {
    let release;
    this.held = new Promise((resolve) => { release = resolve; });
    return release;
  }

  async #forward(request, response) {
    const { method, url, headers } = request;
    const seen = { method, url, headers, body: "" };
    this.requests.push(seen);
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    seen.body = Buffer.concat(chunks).toString();
    await this.held;
    const instead = this.answers[url.slice(this.prefix.length)];
    if (instead) return response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(instead));
    if (!url.startsWith(`${this.prefix}/`)) return response.writeHead(404).end();
    const inner = http.request(this.service.url + url.slice(this.prefix.length), { method, headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.rawHeaders);
      answer.pipe(response);
    });
    inner.on("error", () => response.destroy());
    inner.end(seen.body);
  }
}

/** One browser for all tests; each of its pages has a context of its own, so storage and viewport are new. */
export class Browser {
  static async launch() {
    const found = new Browser();
    found.browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", "--disable-gpu"] });
    return found;
  }

  close = () => this.browser.close();

  /** A new page with what went wrong on it: exceptions, lines of the console, violations of the page's own policy. */
  async page({ width = 1280, height = 900, colorScheme = "light" } = {}) {
    const context = await this.browser.newContext({ viewport: { width, height }, colorScheme, reducedMotion: "reduce" });
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
    const page = await context.newPage();
    page.setDefaultTimeout(WAIT_MS);
    const seen = { faults: [], urls: [] };
    page.on("request", (request) => seen.urls.push(request.url()));
    page.on("pageerror", (error) => seen.faults.push(String(error)));
    page.on("console", (line) => {
      // A refusal that the page shows is also written by the browser itself.
      if (["error", "warning"].includes(line.type()) && !/^Failed to load resource/.test(line.text())) seen.faults.push(line.text());
    });
    await context.exposeBinding("toldViolation", (_, text) => seen.faults.push(text));
    await context.addInitScript(() => addEventListener("securitypolicyviolation", (event) => {
      window.toldViolation(`${event.violatedDirective} forbids ${event.blockedURI}`);
    }));
    return { page, seen, close: () => context.close() };
  }
}

/** What axe-core finds on a page, one line a rule; it comes from outside, so the page's policy does not hold for it. */
export async function violations(page) {
  await page.evaluate(AXE);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return found.violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ target, failureSummary }) => `${target} ${failureSummary}`).join("; ")}`);
}
