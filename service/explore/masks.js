// Masks are tried: their objects as the API takes them, their meaning in words, and the controls that add and remove them.

import { labelled, make } from "./dom.js";

/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./picture.js").Side} Side */
/** @typedef {Record<string, any>} Mask a mask as the API takes it */
/** @typedef {{ rows: number, columns: number, sequences: number }} Sizes */

const MAX_LISTED = 16384;
const ALONE = "A mask acts on this layer alone: the hidden states in front of it come from the unmasked model.";

/** The bias of query i and key j: −slope·|i − j|, or slope·(j − i).
 * @param {number} slope @param {boolean} isSigned @param {number} i @param {number} j */
const biasOf = (slope, isSigned, i, j) => Math.fround(isSigned ? slope * (j - i) : -slope * Math.abs(i - j)) + 0;

/** Return the bias of a slope; above 16,384 numbers as base64, which no limit on text counts.
 * @param {number} slope @param {boolean} isSigned @param {Sizes} sizes @returns {Mask} */
export function slopeMask(slope, isSigned, { rows, columns }) {
  const table = Array.from({ length: rows }, (_, i) =>
    Array.from({ length: columns }, (_, j) => biasOf(Math.fround(slope), isSigned, i, j)));
  if (rows * columns <= MAX_LISTED) return { kind: "bias", axes: "ls", values: table };
  const data = base64(new Uint8Array(new Float32Array(table.flat()).buffer));
  return { kind: "bias", axes: "ls", values: { dtype: "float32", shape: [rows, columns], data } };
}

/** @param {Uint8Array} bytes */
export function base64(bytes) {
  const parts = [];
  for (let i = 0; i < bytes.length; i += 0x6000) parts.push(String.fromCharCode(...bytes.subarray(i, i + 0x6000)));
  return btoa(parts.join(""));
}

/** Return a mask that blocks these keys for every query, or null for none.
 * @param {Iterable<number>} keys @param {number} columns @returns {Mask | null} */
export function ignoreMask(keys, columns) {
  const blocked = new Set(keys);
  const values = Array.from({ length: columns }, (_, j) => blocked.has(j));
  return values.includes(true) ? { kind: "ignore", axes: "s", values } : null;
}

/** Whether this page's token buttons show the mask. @param {Mask} mask */
export const isOfTokens = (mask) => mask.kind === "ignore" && mask.axes === "s" && Array.isArray(mask.values);

/** Return the masks that fit another text: those with a list of values have one for each of their own text's tokens. @param {Mask[]} masks */
export const ofAnyText = (masks) => masks.filter(({ values }) => typeof values !== "object");

/** Say in words what a mask does. @param {Mask} mask @param {string[]} [columns] names of the keys @returns {string} */
export function explainMask(mask, columns = []) {
  switch (mask.kind) {
    case "causal":
      return `Causal: a query sees its own key and those before it; ${position(mask)}`;
    case "window":
      return `Window: a query sees ${side(mask.left)} before and ${side(mask.right)} after its own; ${position(mask)}`;
    case "lengths":
      return `Lengths: only the first keys are seen: ${[mask.values].flat().join(", ")}`;
    case "ignore": {
      if (!isOfTokens(mask)) return "Ignore: cells that are true are blocked";
      const names = mask.values.flatMap((/** @type {unknown} */ blocked, /** @type {number} */ j) =>
        blocked ? [columns[j] ?? `key ${j}`] : []);
      return `Ignored, so that no query sees it: ${names.join(", ")}`;
    }
    case "bias":
      return slopeWords(mask) ?? "Bias: numbers that are added to the scaled scores";
    default:
      return "Attend: cells that are true are seen, all others are blocked";
  }
}

/** @param {number | null | undefined} reach */
const side = (reach) => (reach == null ? "all keys" : reach === 1 ? "1 key" : `${reach} keys`);

/** @param {Mask} mask */
function position(mask) {
  if (mask.offset != null) return `query 0 stands at key ${[mask.offset].flat().join(", ")}`;
  return mask.align === "bottom_right" ? "the last query stands at the last key" : "query 0 stands at key 0";
}

/** @param {Mask} mask */
function slopeWords({ axes, values }) {
  const isList = Array.isArray(values?.[0]);
  const columns = isList ? values[0].length : values?.shape?.[1];
  const floats = isList ? values.flat() : floatsOf(values);
  for (const isSigned of [false, true]) {
    const slope = isSigned ? floats[1] : -floats[1];
    const holds = (/** @type {number} */ found, /** @type {number} */ k) =>
      found === biasOf(slope, isSigned, Math.floor(k / columns), k % columns);
    if (axes !== "ls" || !(columns > 1) || !slope || !floats.every(holds)) continue;
    const factor = Number((isSigned ? slope : -slope).toPrecision(6));
    return `Bias: ${factor} × ${isSigned ? "(key − query)" : "the distance of query and key"} is added to the scaled scores`;
  }
  return null;
}

/** Return the numbers of a base64 tensor of float32 or float64, none of anything else. @param {any} tensor @returns {number[]} */
export function floatsOf(tensor) {
  try {
    const { buffer } = Uint8Array.from(atob(tensor.data), (character) => character.charCodeAt(0));
    return [...(tensor.dtype === "float64" ? new Float64Array(buffer) : new Float32Array(buffer))];
  } catch {
    return [];
  }
}

/** The controls for the masks of a side, built once, so that a redrawn picture leaves focus and half-filled fields alone. */
export class MaskEditor {
  /** @param {HTMLElement} container @param {(masks: Mask[]) => void} onChange gets the new list */
  constructor(container, onChange) {
    /** @type {Mask[]} */
    this.masks = [];
    /** @type {Sizes} */
    this.sizes = { rows: 0, columns: 0, sequences: 1 };
    this.onChange = onChange;
    this.list = make("ul", { class: "masks", "aria-label": "Masks in use", tabindex: "-1" });
    this.tokens = make("div", { class: "ignored-tokens", role: "group", "aria-label": "Tokens to ignore" });
    this.note = make("p", { class: "note" });
    container.replaceChildren(
      make("fieldset", { class: "mask-editor" }, make("legend", {}, "Masks"), this.list, this.form(),
        make("details", { open: true }, make("summary", {}, "Ignore tokens"), this.tokens), this.note));
  }

  /** The form that adds a mask: a kind, and the fields of that kind. */
  form() {
    const fields = make("span", { class: "mask-fields" });
    const kind = make("select", {}, ...Object.entries(KINDS).map(([value, { title }]) => make("option", { value }, title)));
    const shown = () => fields.replaceChildren(...KINDS[kind.value].fields());
    kind.addEventListener("change", shown);
    shown();
    const add = (/** @type {Event} */ event) => {
      event.preventDefault();
      /** @type {any} */
      const given = Object.fromEntries(new FormData(/** @type {HTMLFormElement} */ (event.target)));
      this.onChange([...this.masks, KINDS[kind.value].mask(given, this.sizes)]);
    };
    return make("form", { class: "mask-form", onsubmit: add }, labelled("Mask", kind), fields, make("button", {}, "Add mask"));
  }

  /** @param {Side} side @param {Picture} picture */
  show(side, { rows, columns, sequences }) {
    this.masks = side.masks;
    this.sizes = { rows: rows.length, columns: columns.length, sequences };
    this.note.textContent = [
      side.own ? "Masks of the pasted request, and a layer's own, stay." : ALONE, "All masks together must allow a cell; biases add up.",
      rows.length === columns.length ? "Both alignments are the same here: there are as many queries as keys." : "",
    ].join(" ");
    keepFocus(this.list, () => this.list.replaceChildren(...this.masks.map((mask, i) => this.item(mask, i, columns))));
    keepFocus(this.tokens, () => this.tokens.replaceChildren(...columns.map((_, j) => this.token(columns, j))));
  }

  /** @param {Mask} mask @param {number} i @param {string[]} columns */
  item(mask, i, columns) {
    const words = explainMask(mask, columns);
    const remove = () => this.onChange(this.masks.filter((_, other) => other !== i));
    return make("li", {}, `${words} `, make("button", { type: "button", "aria-label": `Remove: ${words}`, onclick: remove }, "Remove"));
  }

  /** @param {string[]} columns @param {number} j */
  token(columns, j) {
    const ignored = this.masks.find(isOfTokens)?.values ?? [];
    const toggle = () => {
      const keys = [...columns.keys()].filter((key) => Boolean(ignored[key]) !== (key === j));
      const made = ignoreMask(keys, columns.length);
      this.onChange([...this.masks.filter((mask) => !isOfTokens(mask)), ...(made ? [made] : [])]);
    };
    const pressed = ignored[j] ? "true" : "false";
    return make("button", { type: "button", class: "token", "aria-pressed": pressed, onclick: toggle }, columns[j]);
  }
}

/** Redraw, and give the focus to the button at the same place, or to the list itself where none is left.
 * @param {HTMLElement} list @param {() => void} redraw */
function keepFocus(list, redraw) {
  const place = [...list.querySelectorAll("button")].indexOf(/** @type {HTMLButtonElement} */ (document.activeElement));
  redraw();
  if (place < 0) return;
  const buttons = list.querySelectorAll("button");
  (buttons[Math.min(place, buttons.length - 1)] ?? list).focus();
}

/** @typedef {Record<string, string>} Given */

const ALIGN = () => {
  const align = make("select", { name: "align" },
    make("option", { value: "top_left" }, "top left: query 0 at key 0"),
    make("option", { value: "bottom_right" }, "bottom right: last query at last key"),
    make("option", { value: "offset" }, "offset: query 0 at key …"));
  const offset = make("input", { name: "offset", type: "number", step: 1, value: 0, hidden: true, "aria-label": "Key at which query 0 stands" });
  align.addEventListener("change", () => { offset.hidden = align.value !== "offset"; });
  return [labelled("Alignment", align), offset];
};

/** @param {string} title @param {Record<string, unknown>} attributes */
const number = (title, attributes) => labelled(title, make("input", { type: "number", ...attributes }));

/** @param {Given} given */
const placed = ({ align, offset }) => (align === "offset" ? { offset: Math.trunc(Number(offset)) } : { align });

/** @param {string} reach */
const whole = (reach) => (reach === "" ? null : Math.trunc(Number(reach)));

/** @type {Record<string, { title: string, fields: () => HTMLElement[], mask: (given: Given, sizes: Sizes) => Mask }>} */
const KINDS = {
  causal: { title: "causal", fields: ALIGN, mask: (given) => ({ kind: "causal", ...placed(given) }) },
  window: {
    title: "window",
    fields: () => [
      number("Keys before", { name: "left", min: 0, value: 2 }), number("Keys after", { name: "right", min: 0, value: 2 }), ...ALIGN()],
    mask: (given) => ({ kind: "window", left: whole(given.left), right: whole(given.right), ...placed(given) }),
  },
  lengths: {
    title: "length",
    fields: () => [number("First keys that are seen", { name: "length", min: 0, value: 5, required: true })],
    mask: ({ length }, { columns, sequences }) => {
      const values = Math.min(Math.trunc(Number(length)), columns);
      return { kind: "lengths", values: sequences > 1 ? Array(sequences).fill(values) : values };
    },
  },
  slope: {
    title: "bias slope",
    fields: () => [
      number("Slope", { name: "slope", step: "any", min: -1e6, max: 1e6, value: 0.5, required: true }),
      labelled("Form", make("select", { name: "form" },
        make("option", { value: "distance" }, "−slope × distance (ALiBi)"), make("option", { value: "signed" }, "slope × (key − query)")))],
    mask: ({ slope, form }, sizes) => slopeMask(Number(slope), form === "signed", sizes),
  },
};
