// The state in the address: everything behind "#", which a browser never sends. What is too large for it stays in the history entry.

import { EXAMPLES } from "./examples.js";

/** @typedef {import("./picture.js").Side} Side */
/** @typedef {import("./picture.js").State} State */

const NAME = /^[a-z0-9][a-z0-9._-]{0,63}$/;
const ROUTE = /^v1\/(attention|layers\/[a-z0-9][a-z0-9._-]{0,63}\/attend)$/;
/** Characters of a field; a pasted request may have fewer. */
const [MOST, MOST_OWN] = [32768, 4096];
export const SORTS = ["head", "entropy", "previous", "next", "special"];

/** What an example shows. @param {(typeof EXAMPLES)[number]} example @param {string} model @returns {Side} */
export function sideOf({ text, pair, layer, head }, model) {
  return { model, text, pair, layer, head, form: "heads", masks: [], own: null };
}

/** Reads a fragment; whatever it holds, a state comes back. @param {string} fragment @returns {State} */
export function readAddress(fragment) {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  const [first] = EXAMPLES;
  const [row, column] = [number(fields.get("row")), number(fields.get("column"))];
  const side = readSide(fields, "");
  const opens = !fields.has("text") && !side.own;
  const view = fields.get("view");
  const b = fields.has("b.text") || fields.has("b.own") ? readSide(fields, "b.") : null;
  return {
    a: opens ? sideOf(first, name(fields.get("model"))) : side, b,
    view: b && (view === "b" || view === "difference") ? view : "a",
    hideSpecial: fields.get("hide") === "1",
    row: opens ? first.row : row,
    column: opens ? first.column : column,
    sort: SORTS.find((sort) => sort === fields.get("sort")) ?? "head",
  };
}

/** @param {URLSearchParams} fields @param {string} side @returns {Side} */
function readSide(fields, side) {
  const own = parsed(fields.get(`${side}own`));
  const masks = parsed(fields.get(`${side}masks`));
  return {
    model: name(fields.get(`${side}model`)),
    text: fields.get(`${side}text`) ?? "",
    pair: fields.get(`${side}pair`) ?? "",
    layer: number(fields.get(`${side}layer`)) ?? 0,
    head: number(fields.get(`${side}head`)) ?? 0,
    form: fields.get(`${side}form`) === "contributions" ? "contributions" : "heads",
    masks: Array.isArray(masks) ? masks.filter(isObject) : [],
    own: isObject(own) ? readOwn(own) : null,
  };
}

/** A pasted request goes to the routes of attention and nowhere else. @param {Record<string, any>} own @returns {import("./picture.js").Own | null} */
function readOwn({ path, body, rows, columns, sequence }) {
  if (typeof path !== "string" || !ROUTE.test(path) || !isObject(body)) return null;
  return { path, body, rows: texts(rows), columns: texts(columns), sequence: Number.isInteger(sequence) && sequence > 0 ? sequence : 0 };
}

/** Writes a state; parts that are too large are left out, and `complete` says whether none was. @param {State} state */
export function writeAddress(state) {
  const fields = new URLSearchParams();
  let complete = true;
  /** @param {string} field @param {any} value */
  const put = (field, value, most = MOST) => {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    if (text.length > most) complete = false;
    else fields.set(field, text);
  };
  for (const [prefix, side] of /** @type {[string, Side | null][]} */ ([["", state.a], ["b.", state.b]])) {
    if (!side) continue;
    const { own, text, pair, model, layer, head, form, masks } = side;
    if (own) put(`${prefix}own`, own, MOST_OWN);
    else Object.entries({ text, ...(pair && { pair }), model, layer }).forEach(([field, value]) => put(prefix + field, value));
    put(`${prefix}head`, head);
    if (form !== "heads") put(`${prefix}form`, form);
    if (masks.length) put(`${prefix}masks`, masks);
  }
  const { view, hideSpecial, row, column, sort } = state;
  const rest = { ...(view !== "a" && { view }), ...(hideSpecial && { hide: "1" }), ...(sort !== "head" && { sort }) };
  for (const [field, value] of Object.entries(rest)) put(field, value);
  if (row !== null) put("row", row);
  if (column !== null) put("column", column);
  return { fragment: `#${fields}`, complete };
}

/** @param {string | null} text */
const name = (text) => (NAME.test(text ?? "") ? (text ?? "") : "");
/** @param {string | null} text */
const number = (text) => (/^\d{1,6}$/.test(text ?? "") ? Number(text) : null);
/** @param {any} value @returns {value is Record<string, any>} */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
/** @param {any} values @returns {string[]} */
const texts = (values) => (Array.isArray(values) ? values.map((text) => (typeof text === "string" ? text : "")) : []);

/** @param {string | null} text @returns {any} */
function parsed(text) {
  try {
    return JSON.parse(text ?? "null");
  } catch {
    return null;
  }
}
