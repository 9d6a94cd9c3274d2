// The heads of a layer as small pictures on one scale, with what tells them apart: entropy, and which neighbours or marks they read.

import { make } from "./dom.js";
import { imageOf } from "./scale.js";

/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {{ entropy: number, previous: number, next: number, special: number }} Measures */

/** The orders of thumbnails, as the page names them. @type {Record<string, string>} */
export const SORT_NAMES = {
  head: "head", entropy: "entropy, sharpest first", previous: "share of the previous token", next: "share of the next token", special: "share of [CLS] and [SEP]",
};
/** @type {WeakMap<Picture, Map<number, Measures>>} */
const known = new WeakMap();

/** What tells a head apart: means over its rows of the entropy, and of the share of a row at a place.
 * @param {Picture} picture @param {number} head @returns {Measures} */
export function measure(picture, head) {
  const found = known.get(picture) ?? new Map();
  known.set(picture, found);
  if (!found.has(head)) found.set(head, measured(picture, head));
  return found.get(head);
}

/** @param {Picture} picture @param {number} head @returns {Measures} */
function measured({ tables, entropy, special, rows, columns }, head) {
  const table = tables.get(head) ?? new Float32Array();
  const [L, S] = [rows.length, columns.length];
  const sums = { entropy: 0, previous: 0, next: 0, special: 0 };
  let seen = 0;
  for (let row = 0; row < L; row++) {
    let [total, marks] = [0, 0];
    for (let key = 0; key < S; key++) {
      total += table[row * S + key];
      if (special[key]) marks += table[row * S + key];
    }
    if (!total) continue;
    seen += 1;
    sums.entropy += entropy?.[head * L + row] ?? 0;
    sums.special += marks / total;
    if (L === S && row > 0) sums.previous += table[row * S + row - 1] / total;
    if (L === S && row < S - 1) sums.next += table[row * S + row + 1] / total;
  }
  const rest = Math.max(seen - 1, 1);
  return { entropy: sums.entropy / Math.max(seen, 1), previous: sums.previous / rest, next: sums.next / rest, special: sums.special / Math.max(seen, 1) };
}

/** @param {Picture} picture @param {string} sort */
export function sorted(picture, sort) {
  const heads = [...picture.tables.keys()];
  const by = /** @type {keyof Measures} */ (sort);
  if (sort === "head") return heads.sort((a, b) => a - b);
  return heads.sort((a, b) => (measure(picture, a)[by] - measure(picture, b)[by]) * (sort === "entropy" ? 1 : -1));
}

/** Shows the heads of one picture as buttons.
 * @param {HTMLElement} container @param {Picture} picture @param {import("./scale.js").Scale} scale
 * @param {{ sort: string, chosen: number | null, prefix: string, choose: (head: number) => void }} how */
export function thumbnails(container, picture, scale, { sort, chosen, prefix, choose }) {
  container.replaceChildren(make("div", { class: "thumbs" }, ...sorted(picture, sort).map((head) => {
    const found = measure(picture, head);
    const canvas = make("canvas", { "aria-hidden": "true" });
    paint(canvas, picture.tables.get(head) ?? new Float32Array(), picture.columns.length, picture.masked.get(head), scale);
    return make("button", {
      type: "button", class: "thumb", id: `${prefix}${head}`, "aria-pressed": String(head === chosen), onclick: () => choose(head),
    }, canvas, make("b", {}, make("span", { class: "unseen" }, "head "), `${head}`), make("span", { class: "unseen" }, ", "), ...badge(found, sort, picture.special.includes(true)));
  })));
}

/** The entropy, the larger share of a neighbour (or the one that sorts) and, where there are some, the share of the special tokens.
 * @param {Measures} found @param {string} sort @param {boolean} hasSpecial */
function badge(found, sort, hasSpecial) {
  const isNext = sort === "next" || (sort !== "previous" && found.next > found.previous);
  const share = (/** @type {string} */ what, /** @type {number} */ part) =>
    [make("span", { class: "unseen" }, ", "), make("span", { class: "share" }, `${what} ${Math.round(part * 100)}%`)];
  return [make("span", { class: "nats" }, `${found.entropy.toFixed(2)} nats`),
    ...(isNext ? share("next", found.next) : share("previous", found.previous)), ...(hasSpecial ? share("[CLS]/[SEP]", found.special) : [])];
}

/** @param {HTMLCanvasElement} canvas @param {Float32Array} values @param {number} columns
 * @param {Uint8Array | null | undefined} masked @param {import("./scale.js").Scale} scale */
export function paint(canvas, values, columns, masked, scale) {
  canvas.width = columns;
  canvas.height = values.length / columns;
  canvas.getContext("2d")?.putImageData(imageOf(values, columns, masked, scale), 0, 0);
}
