// Taking a picture along: its request as curl and Python, its figures as HTML, PNG, SVG and CSV. Foreign text is quoted here.

import { make } from "./dom.js";
import { explainMask } from "./masks.js";
import { colour, figure, valueAt } from "./scale.js";
import { apiKey } from "./service.js";

/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./picture.js").Drawn} Drawn */
/** What can be taken along: the pictures that were asked for (two if they are compared), and what is drawn of them.
 * @typedef {{ pictures: Picture[], drawn: Drawn, canvas: HTMLCanvasElement }} Shown */

/** More bytes than this do not fit into one argument of a program. */
const MAX_ARGUMENT = 100_000;
const LIMITS = "A mask acts on this layer alone. Attention is not explanation.";

/** Characters that are not seen, turn text around, or move a terminal's cursor. */
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cn}\p{Co}]/gu;
const hex = (/** @type {number} */ code, /** @type {number} */ digits) => code.toString(16).padStart(digits, "0");

/** JSON without unseen characters. @param {unknown} value */
const json = (value) =>
  JSON.stringify(value).replace(UNSEEN, (unseen) => unseen.split("").map((unit) => `\\u${hex(unit.charCodeAt(0), 4)}`).join(""));

/** One word for a POSIX shell. @param {string} text */
export const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return the request as a command for a POSIX shell, with a variable in place of the key.
 * @param {{ path: string, body: object }} request @param {string} base address of the service, with a slash at its end
 * @param {boolean} hasKey */
export function curl({ path, body }, base, hasKey) {
  const text = json(body);
  const isLong = new TextEncoder().encode(text).length > MAX_ARGUMENT;
  const words = [
    `${isLong ? `printf %s ${shellQuoted(text)} | ` : ""}curl -sS ${shellQuoted(base + path)}`,
    "-H 'Content-Type: application/json'",
    ...(hasKey ? ['-H "Authorization: Bearer $ATTENTION_KEY"'] : []),
    `--data-binary ${isLong ? "@-" : shellQuoted(text)}`,
  ];
  return words.join(" \\\n  ");
}

/** A literal of Python. @param {unknown} value @returns {string} */
export function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, part]) => `${literal(name)}: ${literal(part)}`).join(", ")}}`;
  return JSON.stringify(value).replace(UNSEEN, (unseen) => {
    const code = unseen.codePointAt(0) ?? 0;
    return code > 0xffff ? `\\U${hex(code, 8)}` : `\\u${hex(code, 4)}`;
  });
}

/** @param {Record<string, unknown>} fields */
const keywords = (fields) => Object.entries(fields).map(([name, value]) => `${name}=${literal(value)}`);

/** A mask as the client makes it. @param {Record<string, any>} mask */
function maskCall({ kind, values, ...fields }) {
  const array = values?.data
    && `np.frombuffer(base64.b64decode(${literal(values.data)}), ${literal(values.dtype)}).reshape(${literal(values.shape)})`;
  const given = values === undefined ? [] : [array ?? literal(values).replaceAll('"-inf"', 'float("-inf")')];
  return `masks.${kind}(${[...given, ...keywords(fields)].join(", ")})`;
}

/** @param {Picture} picture */
function pythonCall({ path, body, source }) {
  if (path === "v1/attention") return `client.attention_json(${literal(body)})`;
  if (source.own) return `client.attend_json(${literal(decodeURIComponent(path.split("/")[2]))}, ${literal(body)})`;
  const { form, ...selected } = body.weights;
  const call = [
    ...[source.model, body.text, ...(body.text_pair ? [body.text_pair] : [])].map(literal), `layer=${literal(body.layer)}`,
    ...(body.masks?.length ? [`masks=[${body.masks.map(maskCall).join(", ")}]`] : []),
    `weights=Weights(${[literal(form), ...keywords(selected)].join(", ")})`, ...(body.entropy ? ["entropy=True"] : []),
  ];
  return `client.attend_text(\n    ${call.join(",\n    ")},\n)`;
}

/** Return the requests as a program that needs the client alone.
 * @param {Picture[]} pictures @param {string} base @param {boolean} hasKey */
export function python(pictures, base, hasKey) {
  const calls = pictures.map((picture) => {
    const found = picture.source.own ? 'answer["weights"]' : "answer.weights";
    return `answer = ${pythonCall(picture)}\nprint(${found})  # [heads, queries, keys]\n`;
  });
  const used = calls.join("\n");
  const names = ["Client", ...(used.includes("Weights(") ? ["Weights"] : []), ...(used.includes("masks.") ? ["masks"] : [])];
  const imports = [...(used.includes("np.frombuffer") ? ["import base64", ""] : []), ...(hasKey ? ["import os", ""] : [])];
  const numpy = used.includes("np.frombuffer") ? ["import numpy as np"] : [];
  const client = `client = Client(${literal(base.replace(/\/$/, ""))}${hasKey ? ', api_key=os.environ["ATTENTION_KEY"]' : ""})`;
  return [...imports, ...numpy, `from attention_client import ${names.join(", ")}`, "", client, used].join("\n");
}

/** A quoted field of text, with an apostrophe in front of what a spreadsheet would run as a formula. @param {string} text */
const field = (text) => `"${(/^[=+\-@\t\r\n＝＋－＠]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

/** The figures as CSV (RFC 4180): a row for each query, a column for each key. @param {Drawn} drawn */
export function csv({ rows, columns, values }) {
  const lines = rows.map((row, i) =>
    [field(row), ...columns.map((_, j) => Number(values[i * columns.length + j].toPrecision(7)))].join(","));
  return `${[["query \\ key", ...columns].map(field).join(","), ...lines].join("\r\n")}\r\n`;
}

/** Text for XML and HTML, in elements and in attributes; what XML cannot hold is replaced. @param {string} text */
export const escaped = (text) =>
  text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]/gu, "\ufffd").replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

/** The matrix as a drawing of its own: labelled, masked cells hatched, with a bar of the scale. @param {Drawn} drawn */
export function svg({ title, rows, columns, values, masked, scale }) {
  const light = { ...scale, dark: false };
  const cell = Math.min(Math.max(640 / Math.max(rows.length, columns.length), 4), 28);
  const size = Math.min(12, cell);
  const room = (/** @type {string[]} */ names) => Math.max(...names.map((name) => [...name].length)) * size * 0.65 + 12;
  const [width, height, left] = [columns.length * cell, rows.length * cell, room(rows) + 16];
  const whole = left + Math.max(width, 320) + 16;
  const heading = title.match(new RegExp(`\\S.{0,${Math.floor(whole / 7) - 4}}(?!\\S)`, "gsu")) ?? [title];
  const top = room(columns) + 24 + heading.length * 16;
  /** @type {Map<string, string[]>} */
  const shades = new Map();
  values.forEach((value, at) => {
    const fill = masked?.[at] ? "url(#masked)" : colour(light, value);
    if (!shades.has(fill)) shades.set(fill, []);
    shades.get(fill)?.push(`M${at % columns.length} ${Math.floor(at / columns.length)}h1v1h-1z`);
  });
  const text = (/** @type {string} */ words, /** @type {string} */ attributes) => `<text ${attributes}>${escaped(words)}</text>`;
  const middle = (/** @type {number} */ i) => (i + 0.5) * cell;
  const bar = Array.from({ length: 32 }, (_, i) =>
    `<rect x="${left + i * 4}" y="${top + height + 16}" width="4" height="10" fill="${colour(light, valueAt(light, i / 31))}"/>`);
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" role="img" width="${whole}" height="${top + height + 48}"`,
    `font-family="sans-serif" font-size="${size}" fill="#111"><title>${escaped(title)}</title><rect width="100%" height="100%" fill="#fff"/>`,
    '<defs><pattern id="masked" width=".3" height=".3" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">',
    '<rect width=".1" height=".3" fill="#888"/></pattern></defs>',
    text("rows: queries, columns: keys", `x="8" y="${heading.length * 16 + 18}" font-size="11"`),
    `<g transform="translate(${left} ${top}) scale(${cell})" shape-rendering="crispEdges">`,
    ...[...shades].map(([fill, cells]) => `<path fill="${fill}" d="${cells.join("")}"/>`), "</g>",
    ...rows.map((row, i) => text(row, `x="${left - 6}" y="${top + middle(i)}" text-anchor="end" dominant-baseline="central"`)),
    ...columns.map((column, j) => text(column, `transform="translate(${left + middle(j)} ${top - 6}) rotate(-90)" dominant-baseline="central"`)),
    ...heading.map((line, i) => text(line, `x="8" y="${18 + i * 16}" font-size="13"`)), ...bar,
    text(figure(valueAt(light, 0)), `x="${left}" y="${top + height + 40}" font-size="11"`),
    text(figure(light.max), `x="${left + 128}" y="${top + height + 40}" font-size="11" text-anchor="end"`), "</svg>",
  ].join("\n");
}

/** Return a document that opens without a server: the drawing, what it shows, and the figures as a table; no script.
 * @param {Drawn} drawn @param {string[]} words */
export function html(drawn, words) {
  const { title, rows, columns, values, masked } = drawn;
  const body = rows.map((row, i) => {
    const cells = columns.map((_, j) => [i * columns.length + j]).map(([at]) => `<td>${masked?.[at] ? "masked" : figure(values[at])}</td>`);
    return `<tr><th scope="row">${escaped(row)}</th>${cells.join("")}</tr>`;
  });
  return `<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width"/><title>${escaped(title)}</title>
<style>body { font: 16px sans-serif; margin: 1rem } svg { max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: 12px } td, th { padding: 2px 6px; text-align: right }</style></head>
<body><h1>Attention</h1>
${words.map((line) => `<p>${escaped(line)}</p>`).join("\n")}
${svg(drawn)}
<table><caption>Rows: queries, columns: keys</caption>
<thead><tr><td></td>${columns.map((column) => `<th scope="col">${escaped(column)}</th>`).join("")}</tr></thead>
<tbody>${body.join("\n")}</tbody></table></body></html>
`;
}

/** What a picture shows, in words. @param {Picture} picture @param {string} name A or B, where two are compared */
function described({ source, layerName, columns }, name) {
  const { own, text, pair, model, masks, form, head } = source;
  const said = own ? `An own request to ${own.path}` : `“${text}”${pair ? ` and “${pair}”` : ""}, model ${model}`;
  const figures = form === "heads" ? "attention weights" : "contributions";
  const states = own ? [] : ["The hidden states come from the unmasked model."];
  return [`${name}${said}, layer ${layerName}, head ${head}, ${figures}.`, ...states, ...masks.map((mask) => `${explainMask(mask, columns)}.`)];
}

/** The canvas as a PNG file. @param {HTMLCanvasElement} canvas @returns {Promise<Blob>} */
export const png = (canvas) => new Promise((resolve, reject) => {
  canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("The browser could not write this picture as PNG."))));
});

/** Show the buttons that copy and save; `get` gives what is shown, or null.
 * @param {HTMLElement} container @param {() => Shown | null} get */
export function exportMenu(container, get) {
  const base = new URL("../", import.meta.url).href;
  const status = make("p", { role: "status" });
  const copied = make("textarea", { readonly: true, rows: 8, hidden: true, "aria-label": "The copied text" });
  const copy = async (/** @type {string} */ text) => {
    copied.value = text;
    copied.hidden = false;
    copied.select();
    // The clipboard is for secure origins; elsewhere the selected text is copied.
    const isCopied = (await navigator.clipboard?.writeText(text).then(() => true, () => false)) || document.execCommand("copy");
    status.textContent = isCopied ? "Copied." : "The browser does not let this page copy: the text is selected.";
  };
  const save = (/** @type {string} */ ending, /** @type {Blob} */ blob) => {
    const address = URL.createObjectURL(blob);
    make("a", { href: address, download: `attention.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    status.textContent = ending === "csv" ? "Saved. Labels that begin with = + - @ have an apostrophe, so that no spreadsheet runs them." : "Saved.";
  };
  const file = (/** @type {string} */ text, /** @type {string} */ type) => new Blob([text], { type: `${type};charset=utf-8` });
  /** @type {[string, (shown: Shown) => unknown][]} */
  const actions = [
    ["Copy as curl", ({ pictures }) => copy(pictures.map((picture) => curl(picture, base, Boolean(apiKey()))).join("\n\n"))],
    ["Copy as Python", ({ pictures }) => copy(python(pictures, base, Boolean(apiKey())))],
    ["Save HTML", ({ pictures, drawn }) => {
      const words = pictures.flatMap((picture, i) => described(picture, pictures.length > 1 ? `${"AB"[i]}: ` : ""));
      save("html", file(html(drawn, [...words, LIMITS]), "text/html"));
    }],
    ["Save PNG", async ({ canvas }) => save("png", await png(canvas))],
    ["Save SVG", ({ drawn }) => save("svg", file(svg(drawn), "image/svg+xml"))],
    ["Save CSV", ({ drawn }) => save("csv", file(csv(drawn), "text/csv"))],
  ];
  const run = async (/** @type {(shown: Shown) => unknown} */ action) => {
    const shown = get();
    if (!shown) status.textContent = "Nothing is drawn yet.";
    else await Promise.resolve(shown).then(action).catch((error) => { status.textContent = error.message; });
  };
  const buttons = actions.map(([title, action]) => make("button", { type: "button", onclick: () => run(action) }, title));
  container.replaceChildren(make("div", { class: "export", role: "group", "aria-label": "Take the picture along" }, ...buttons), status, copied);
}
