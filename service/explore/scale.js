// Colours that stay apart for colour-blind eyes: one scale from nothing to much, one from less over equal to more.

/** Sequential values run from 0 to max, shaded by their square root so that small ones show; diverging ones from -max to max.
 * @typedef {{ kind: "sequential" | "diverging", max: number, dark: boolean }} Scale */

const STOPS = {
  sequential: {
    light: ["#fbfaf6", "#d3e6e4", "#86bfc9", "#3a8bb0", "#1f568c", "#1a2456"],
    dark: ["#15181f", "#1d3557", "#28658f", "#3d9ba8", "#93d3a2", "#fbf6c2"],
  },
  diverging: {
    light: ["#0b4a86", "#5b96c9", "#f6f4ef", "#e79a4e", "#a34a00"],
    dark: ["#8cc6ff", "#2f6aa3", "#1a1d24", "#a85a17", "#ffb066"],
  },
};

/** 1,024 packed RGB colours a scale: drawing looks colours up. @type {Map<string, Uint32Array>} */
const tables = new Map();

/** Where a value stands on its scale, 0 to 1. @param {Scale} scale @param {number} value */
export function position(scale, value) {
  const part = scale.max > 0 ? value / scale.max : 0;
  const at = scale.kind === "diverging" ? (part + 1) / 2 : Math.sqrt(Math.max(part, 0));
  return Math.min(Math.max(at, 0), 1) || 0;
}

/** The value at a place of the scale. @param {Scale} scale @param {number} at 0 to 1 */
export function valueAt(scale, at) {
  return scale.max * (scale.kind === "diverging" ? 2 * at - 1 : at * at);
}

/** @param {Scale} scale */
function colours(scale) {
  const key = scale.kind + scale.dark;
  let table = tables.get(key);
  if (!table) {
    const stops = STOPS[scale.kind][scale.dark ? "dark" : "light"].map((text) => parseInt(text.slice(1), 16));
    table = Uint32Array.from({ length: 1024 }, (_, at) => between(stops, at / 1023));
    tables.set(key, table);
  }
  return table;
}

/** @param {number[]} stops @param {number} at */
function between(stops, at) {
  const place = Math.min(at * (stops.length - 1), stops.length - 1.001);
  const [low, high] = [stops[Math.floor(place)], stops[Math.floor(place) + 1]];
  const part = place % 1;
  const mix = [16, 8, 0].map((bits) => Math.round(((low >> bits) & 255) * (1 - part) + ((high >> bits) & 255) * part));
  return (mix[0] << 16) | (mix[1] << 8) | mix[2];
}

/** The colour of a value, as CSS writes it. @param {Scale} scale @param {number} value */
export function colour(scale, value) {
  return "#" + colours(scale)[Math.round(position(scale, value) * 1023)].toString(16).padStart(6, "0");
}

/** Black or white, whichever reads better on the colour of a value. @param {Scale} scale @param {number} value */
export function inkOn(scale, value) {
  const rgb = colours(scale)[Math.round(position(scale, value) * 1023)];
  return ((rgb >> 16) & 255) * 0.3 + ((rgb >> 8) & 255) * 0.59 + (rgb & 255) * 0.11 > 140 ? "#14161a" : "#ffffff";
}

/** A table as an image of one pixel a cell; masked cells are left to the background.
 * @param {Float32Array} values @param {number} columns @param {Uint8Array | null | undefined} masked @param {Scale} scale */
export function imageOf(values, columns, masked, scale) {
  const image = new ImageData(columns, values.length / columns);
  const pixels = new Uint32Array(image.data.buffer);
  const table = colours(scale);
  for (let at = 0; at < values.length; at++) {
    if (masked?.[at]) continue;
    const rgb = table[(position(scale, values[at]) * 1023) | 0];
    pixels[at] = 0xff000000 | ((rgb & 255) << 16) | (rgb & 0xff00) | (rgb >> 16);
  }
  return image;
}

/** A figure as the page writes it: three digits, a true minus, one digit that counts where three would say 0.
 * @param {number} value */
export function figure(value) {
  if (!Number.isFinite(value)) return String(value);
  const small = value !== 0 && Math.abs(value) < 0.0005;
  return (small ? value.toPrecision(1) : value.toFixed(3)).replaceAll("-", "−");
}
