// The tokens as chips: of the one pointed at, where it looks (lines above, shades) and who looks at it (lines below), with figures.

import { make } from "./dom.js";
import { colour, inkOn } from "./scale.js";

/** @typedef {import("./picture.js").Drawn} Drawn */
/** @typedef {import("./picture.js").Cursor} Cursor */

const SVG = "http://www.w3.org/2000/svg";
const MOST_LINES = 12;

export class TokenChips {
  /** @param {HTMLElement} container
   * @param {{ point: (cursor: Cursor | null) => void, lock: (row: number) => void }} on */
  constructor(container, on) {
    this.on = on;
    this.lines = document.createElementNS(SVG, "svg");
    this.lines.setAttribute("aria-hidden", "true");
    this.lists = make("div", { class: "chips-lists" });
    container.replaceChildren(make("div", { class: "chips-box" }, this.lists, this.lines));
    /** @type {HTMLButtonElement[]} */ this.queries = [];
    /** @type {HTMLButtonElement[]} */ this.keys = [];
    /** @type {Drawn | null} */ this.drawn = null;
    this.isSame = false;
  }

  /** @param {Drawn} drawn */
  draw(drawn) {
    const had = this.lists.contains(document.activeElement) ? [...this.queries, ...this.keys].indexOf(/** @type {any} */ (document.activeElement)) : -1;
    this.drawn = drawn;
    this.isSame = drawn.rows.length === drawn.columns.length && drawn.rows.every((name, at) => name === drawn.columns[at]);
    this.queries = drawn.rows.map((name, at) => this.chip(name, { row: at, column: null }));
    this.keys = this.isSame ? this.queries : drawn.columns.map((name, at) => this.chip(name, { row: null, column: at }));
    const lists = this.isSame ? [this.list("Tokens", this.queries)] : ["Queries", this.list("Queries", this.queries), "Keys", this.list("Keys", this.keys)];
    this.lists.replaceChildren(...lists);
    this.lists.parentElement?.classList.toggle("many", drawn.rows.length + drawn.columns.length > 120);
    if (had >= 0) [...this.queries, ...this.keys][had]?.focus();
  }

  /** @param {string} label @param {HTMLButtonElement[]} chips */
  list(label, chips) {
    const list = make("div", { class: "chips", role: "group", "aria-label": `${label}; arrow keys move` }, ...chips);
    if (chips[0]) chips[0].tabIndex = 0;
    list.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = step && chips[chips.indexOf(/** @type {any} */ (event.target)) + step];
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
    list.addEventListener("pointerleave", () => this.on.point(null));
    list.addEventListener("focusout", (event) => list.contains(/** @type {Node | null} */ (event.relatedTarget)) || this.on.point(null));
    return list;
  }

  /** @param {string} name @param {Cursor} cursor */
  chip(name, cursor) {
    const chip = make("button", { type: "button", class: "chip", tabindex: -1 },
      make("span", { class: "looks", "aria-hidden": "true" }), make("bdi", {}, name), make("span", { class: "looked", "aria-hidden": "true" }));
    chip.addEventListener("pointerenter", () => this.on.point(cursor));
    chip.addEventListener("focus", () => {
      for (const other of chip.parentElement?.children ?? []) /** @type {HTMLElement} */ (other).tabIndex = other === chip ? 0 : -1;
      this.on.point(cursor);
    });
    if (cursor.row !== null) {
      const row = cursor.row;
      chip.setAttribute("aria-pressed", "false");
      chip.addEventListener("click", () => this.on.lock(row));
    }
    return chip;
  }

  /** Shows one token's attention. @param {Cursor} cursor @param {number | null} locked */
  point({ row, column }, locked) {
    const { drawn } = this;
    if (!drawn) return;
    const [S, seen] = [drawn.columns.length, this.isSame ? row : column];
    const out = row === null ? [] : this.keys.map((_, key) => drawn.values[row * S + key]);
    const into = seen === null ? [] : this.queries.map((_, query) => drawn.values[query * S + seen]);
    this.keys.forEach((chip, at) => shade(chip, out[at], row !== null && drawn.masked?.[row * S + at], drawn.scale));
    this.queries.forEach((chip, at) => {
      chip.lastElementChild?.replaceChildren(into[at] === undefined ? "" : short(into[at]));
      chip.setAttribute("aria-pressed", String(at === locked));
    });
    this.queries.forEach((chip, at) => chip.classList.toggle("pointed", at === row));
    this.drawLines(row === null ? null : this.queries[row], out, seen === null ? null : this.keys[seen], into);
  }

  /** @param {HTMLElement | null} query @param {number[]} out @param {HTMLElement | null} key @param {number[]} into */
  drawLines(query, out, key, into) {
    const most = this.drawn?.scale.max || 1;
    this.lines.replaceChildren(
      ...strongest(out).map((at) => line(query, this.keys[at], out[at] / most, "looks", -1)),
      ...strongest(into).map((at) => line(key, this.queries[at], into[at] / most, "looked", 1)));
  }
}

/** The places of the largest values, by size. @param {number[]} values */
export function strongest(values, most = MOST_LINES) {
  const order = values.map((_, at) => at).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  return order.slice(0, most).filter((at) => Math.abs(values[at]) > 0);
}

/** @param {HTMLElement} chip @param {number | undefined} value @param {any} masked @param {import("./scale.js").Scale} scale */
function shade(chip, value, masked, scale) {
  chip.classList.toggle("masked", Boolean(masked));
  chip.firstElementChild?.replaceChildren(masked ? "masked" : value === undefined ? "" : short(value));
  const isShaded = value !== undefined && !masked;
  chip.style.backgroundColor = isShaded ? colour(scale, value) : "";
  chip.style.color = isShaded ? inkOn(scale, value) : "";
}

/** @param {number} value */
const short = (value) => value.toFixed(3).replace(/^-(?!0\.000$)/, "−").replace("-", "");

/** A curve between two chips, on their upper (-1) or lower (1) side.
 * @param {HTMLElement | null} from @param {HTMLElement} to @param {number} part @param {string} kind @param {1 | -1} side */
function line(from, to, part, kind, side) {
  const path = document.createElementNS(SVG, "path");
  if (!from || from === to) return path;
  const [[x, y], [u, v]] = [from, to].map((chip) =>
    [chip.offsetLeft + chip.offsetWidth / 2, chip.offsetTop + (side > 0 ? chip.offsetHeight + 16 : -16)]);
  const bend = (side > 0 ? Math.max(y, v) : Math.min(y, v)) + side * Math.min(14 + Math.abs(x - u) / 7, 58);
  path.setAttribute("d", `M${x} ${y}C${x} ${bend} ${u} ${bend} ${u} ${v}`);
  path.setAttribute("class", kind);
  path.setAttribute("stroke-width", String(0.6 + 6 * Math.abs(part)));
  path.setAttribute("stroke-opacity", String(Math.min(0.18 + Math.abs(part) * 1.1, 1)));
  return path;
}
