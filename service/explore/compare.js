// Two sides and their difference: what the large matrix shows of them, in words and figures.

import { make } from "./dom.js";
import { explainMask } from "./masks.js";
import { paint } from "./thumbnails.js";

/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./picture.js").State} State */
/** @typedef {import("./picture.js").Side} Side */
/** @typedef {import("./picture.js").Drawn} Drawn */
/** @typedef {import("./scale.js").Scale} Scale */

const VIEWS = /** @type {const} */ ({ a: "A", b: "B", difference: "B − A" });

/** The side that the controls change. @param {State} state */
export const editedSide = (state) => (state.b && state.view !== "a" ? state.b : state.a);

/** A side in words. @param {Side} side */
export function inWords(side) {
  const where = side.own ? side.own.path : `${side.model}, layer ${side.layer}`;
  const masks = side.masks.map((mask) => explainMask(mask)).join("; ");
  return `${where}, head ${side.head}, ${side.form === "heads" ? "weights" : "contributions"}${masks ? `; masks: ${masks}` : ""}`;
}

/** Both sides with the beginnings of their texts, and which one the controls change. @param {State} state */
export function bothInWords(state) {
  if (!state.b) return "";
  const [a, b] = [state.a, state.b].map((side) => {
    const text = [...(side.pair ? `${side.text} | ${side.pair}` : side.text)];
    return `${side.own ? "" : `“${text.slice(0, 80).join("")}${text.length > 80 ? "…" : ""}”, `}${inWords(side)}`;
  });
  return `A: ${a} · B: ${b} · The controls change ${state.view === "a" ? "A" : "B"}.`;
}

/** The largest value of a form among some pictures; weights end at 1. @param {Side["form"]} form @param {(Picture | null)[]} pictures */
export function largest(form, pictures) {
  if (form === "heads") return 1;
  let most = 0;
  for (const picture of pictures) {
    if (picture?.source.form !== form) continue;
    for (const table of picture.tables.values()) for (const value of table) if (value > most) most = value;
  }
  return most || 1;
}

/** What a view of one picture shows, without its special tokens where they are hidden; no figure changes.
 * @param {Picture} picture @param {boolean} hideSpecial @param {Scale} scale @returns {Drawn} */
export function drawnOf(picture, hideSpecial, scale) {
  const { rows, columns, special, source } = picture;
  const isHidden = (/** @type {number} */ at) => hideSpecial && special[at];
  const columnsAt = [...columns.keys()].filter((at) => !isHidden(at));
  const rowsAt = [...rows.keys()].filter((at) => rows.length !== columns.length || !isHidden(at));
  const cut = (/** @type {Float32Array | Uint8Array} */ table) => rowsAt.flatMap((row) => columnsAt.map((column) => table[row * columns.length + column]));
  const masked = picture.masked.get(source.head);
  return {
    title: inWords(source), rowsAt, columnsAt, scale,
    rows: rowsAt.map((at) => rows[at]), columns: columnsAt.map((at) => columns[at]),
    values: Float32Array.from(cut(picture.tables.get(source.head) ?? new Float32Array())),
    masked: masked ? Uint8Array.from(cut(masked)) : null,
  };
}

/** B − A, or a sentence why there is none. @param {Drawn} a @param {Drawn} b @param {State} state @returns {Drawn | string} */
export function difference(a, b, state) {
  if (a.rows.length !== b.rows.length || a.columns.length !== b.columns.length) {
    return `A is ${a.rows.length} × ${a.columns.length}, B is ${b.rows.length} × ${b.columns.length}: a difference needs one shape.`;
  }
  if (state.a.form !== state.b?.form) return "A and B show different figures (weights and contributions): their difference would mean nothing.";
  const values = b.values.map((value, at) => value - a.values[at]);
  const max = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  const both = (/** @type {string[]} */ left, /** @type {string[]} */ right) => left.map((name, at) => (name === right[at] ? name : `${name} / ${right[at]}`));
  return {
    ...a, title: a.title === b.title ? `B − A, both ${a.title}` : `B − A: ${b.title}, less ${a.title}`, values, rows: both(a.rows, b.rows), columns: both(a.columns, b.columns),
    masked: a.masked && b.masked ? a.masked.map((one, at) => one & /** @type {Uint8Array} */ (b.masked)[at]) : null,
    scale: { kind: "diverging", max, dark: a.scale.dark },
  };
}

/** Shows the choice of A, B and their difference, each with its picture.
 * @param {HTMLElement} container @param {State} state @param {{ a: Drawn | null, b: Drawn | null, difference: Drawn | string | null }} drawn
 * @param {(change: (state: State) => Partial<State>) => void} onChange `change` gets the state with what was typed */
export function compareBar(container, state, drawn, onChange) {
  if (!state.b) {
    const start = () => onChange(({ a }) => ({ b: structuredClone(a), view: "b" }));
    container.replaceChildren(make("button", { type: "button", id: "compare-start", onclick: start }, "Compare with another"));
    return;
  }
  const tabs = Object.entries(VIEWS).map(([key, label]) => {
    const view = /** @type {keyof typeof VIEWS} */ (key);
    const canvas = make("canvas", { "aria-hidden": "true" });
    const shown = drawn[view];
    if (shown && typeof shown !== "string") paint(canvas, shown.values, shown.columns.length, shown.masked, shown.scale);
    return make("button", { type: "button", class: "thumb tab", id: `view-${view}`, "aria-pressed": String(state.view === view), onclick: () => onChange(() => ({ view })) },
      canvas, make("b", {}, label), make("span", { class: "unseen" }, view === "difference" ? " difference" : ""));
  });
  const swap = () => onChange(({ a, b }) => ({ a: /** @type {Side} */ (b), b: a }));
  container.replaceChildren(...tabs,
    make("button", { type: "button", id: "compare-swap", onclick: swap }, "Swap"),
    make("button", { type: "button", id: "compare-end", onclick: () => onChange((now) => ({ b: null, view: "a", a: editedSide(now) })) }, "Keep only this"));
}
