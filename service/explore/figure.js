// The figure that is pointed at, in words: a cell, or the strongest of a token's row and column.

import { make } from "./dom.js";
import { figure } from "./scale.js";
import { strongest } from "./tokens.js";

/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./picture.js").Drawn} Drawn */
/** What else is shown: `picture` is null where the figures are a difference; `isSame`: queries and keys are the same tokens.
 * @typedef {{ a: Drawn | null, b: Drawn | null, picture: Picture | null, isSame: boolean }} Around */

/** Says the figure, and what it is of.
 * @param {HTMLElement} line @param {HTMLElement} about @param {Drawn} main @param {import("./picture.js").Cursor} cursor @param {Around} around */
export function sayFigure(line, about, main, { row, column }, around) {
  const S = main.columns.length;
  const name = (/** @type {string} */ text) => make("bdi", {}, text);
  const most = (/** @type {string[]} */ names, /** @type {number[]} */ values) => strongest(values, 3).flatMap((at, place) =>
    [place ? ", " : "", name(names[at]), " ", make("strong", {}, figure(values[at]))]);
  const ofRow = row === null ? [] : [...main.values.subarray(row * S, (row + 1) * S)];
  const seen = column ?? (around.isSame ? row : null);
  const into = seen === null ? [] : most(main.rows, main.rows.map((_, query) => main.values[query * S + seen]));
  about.textContent = [main.title, ...(row === null ? [] : ofWhat(main, row, column, around))].join(" · ");
  if (row !== null && column !== null) {
    const value = main.masked?.[row * S + column] ? "masked" : (!around.picture && ofRow[column] > 0 ? "+" : "") + figure(ofRow[column]);
    line.replaceChildren(name(main.rows[row]), " → ", name(main.columns[column]), " ", make("strong", {}, value));
  } else if (row !== null) {
    line.replaceChildren(name(main.rows[row]), " → ", ...(ofRow.some(Boolean) ? most(main.columns, ofRow) : ["nothing"]), make("small", {}, into.length ? " and to it: " : "", ...into));
  } else line.replaceChildren(...(column === null ? ["Point at a token or a cell"] : [...into, " → ", name(main.columns[column])]));
}

/** @param {Drawn} main @param {number} row @param {number | null} column @param {Around} around */
function ofWhat(main, row, column, { a, b, picture }) {
  const words = [`query ${main.rowsAt[row]}${column === null ? "" : `, key ${main.columnsAt[column]}`}`];
  if (picture) {
    words.push(`entropy of the row ${entropyOf(picture, main.rowsAt[row])} nats`);
    const [table, start] = [picture.tables.get(picture.source.head), main.rowsAt[row] * picture.columns.length];
    const hidden = [...picture.columns.keys()].filter((key) => !main.columnsAt.includes(key));
    if (hidden.length && table) words.push(`hidden in this row ${figure(hidden.reduce((sum, key) => sum + table[start + key], 0))}`);
  } else if (a && b && column !== null) {
    const at = row * main.columns.length + column;
    words.push(`B ${figure(b.values[at])}, A ${figure(a.values[at])}`);
  }
  return words;
}

/** @param {Picture} picture @param {number} row */
export const entropyOf = ({ entropy, rows, source }, row) => figure(entropy?.[source.head * rows.length + row] ?? NaN);
