// The arithmetic of one cell: score, mask, exp, the row's sum and the weight, in figures that add up as they are shown.

import { make } from "./dom.js";
import { floatsOf } from "./masks.js";
import { get } from "./service.js";

/** @typedef {import("./picture.js").Picture} Picture */
/** What the service says of one cell; `capped` and `contribution` are null where nothing caps, or none was asked for. A layer may add a
 * bias of its own, and a sink, which counts in the row's sum alone.
 * @typedef {{ scaled: number, capped: number | null, softcap: number, masked: number, lse: number, weight: number,
 *   contribution: number | null, hasBias?: boolean, hasSink?: boolean }} Cell */
/** A line: what, how it comes from the figures above, and its own figure. @typedef {[string, string, string]} Line */

/** Return the lines of a cell. Each figure is computed from those shown above it, with the fewest digits that give the weight of the
 * service; where no number of digits does (float32 is spent), the weight is marked with ≈.
 * @param {Cell} cell @returns {Line[]} */
export function figures(cell) {
  for (let shown = 3; shown < 7; shown++) {
    for (let digits = 4; digits < 10; digits++) {
      const { lines, working, weight } = worked(cell, digits);
      const figure = cell.weight.toPrecision(shown);
      if (weight.toPrecision(shown) !== figure) continue;
      return [...lines, line("weight", working, figure), ...contribution(cell, figure)];
    }
  }
  const { lines, working } = worked(cell, 6);
  const figure = cell.weight.toPrecision(3);
  return [...lines, line("weight ≈", working, figure), ...contribution(cell, figure)];
}

/** @param {string} what @param {string} working @param {string} figure @returns {Line} */
const line = (what, working, figure) => [what, working.replaceAll("-", "−"), figure.replaceAll("-", "−").replace("Infinity", "∞")];

/** @param {Cell} cell @param {number} digits behind the point */
function worked(cell, digits) {
  const fixed = (/** @type {number} */ value) => value.toFixed(digits);
  const lines = [line("scaled score", "query · key × scale", fixed(cell.scaled))];
  let score = Number(fixed(cell.scaled));
  if (cell.capped !== null) {
    const working = `${cell.softcap} × tanh(${fixed(score)} / ${cell.softcap})`;
    score = Number(fixed(cell.softcap * Math.tanh(score / cell.softcap)));
    lines.push(line("capped score", working, fixed(score)));
  }
  if (cell.masked === -Infinity) {
    return { lines: [...lines, line("masks add", "a mask blocks this cell", "-Infinity")], working: "exp(-∞) = 0", weight: 0 };
  }
  const added = Number(fixed(cell.masked - (cell.capped ?? cell.scaled)));
  const sum = Number(fixed(score + added));
  const sink = cell.hasSink ? " and of the sink" : "";
  lines.push(line(cell.hasBias ? "the layer's bias and masks add" : "masks add", "", fixed(added)), line("score", `${fixed(score)} + ${fixed(added)}`, fixed(sum)));
  const [exp, total] = [Math.exp(sum), Math.exp(Number(fixed(cell.lse)))].map((value) => value.toPrecision(digits + 1));
  if (Number(exp) > 0 && Number(total) < Infinity && Number(total) > 0) {
    lines.push(line("exp(score)", `exp(${fixed(sum)})`, exp), line(`the row's sum of exp${sink}`, `exp(${fixed(cell.lse)})`, total));
    return { lines, working: `${exp} / ${total}`, weight: Number(exp) / Number(total) };
  }
  lines.push(line(`logarithm of the row's sum of exp${sink}`, "", fixed(cell.lse)));
  const [, , difference] = line("", "", fixed(sum - Number(fixed(cell.lse))));
  return { lines, working: `exp(${difference})`, weight: Math.exp(Number(fixed(sum - Number(fixed(cell.lse))))) };
}

/** @param {Cell} cell @param {string} weight as shown @returns {Line[]} */
function contribution({ contribution: found }, weight) {
  if (found === null || !Number(weight)) return [];
  const shown = found.toPrecision(3);
  let [length, digits] = ["", 3];
  do length = (found / Number(weight)).toPrecision(digits++); while ((Number(weight) * Number(length)).toPrecision(3) !== shown && digits < 9);
  return [
    line("‖v · W_O‖, without a layer ‖v‖", "what the key adds at a weight of 1", length),
    line("contribution", `${weight} × ${length}`, shown),
  ];
}

/** The latest call of each container: answers of earlier ones are dropped. @type {WeakMap<HTMLElement, object>} */
const latest = new WeakMap();

/** A cell of a picture. @typedef {{ picture: Picture, head: number, row: number, column: number }} Place */

/** Show how one cell comes about; `ask` posts a body to the picture's route and gives the answer as JSON.
 * @param {HTMLElement} container @param {Picture} picture @param {number} head @param {number} row @param {number} column
 * @param {(body: object) => Promise<any>} ask */
export async function arithmetic(container, picture, head, row, column, ask) {
  const place = { picture, head, row, column };
  latest.set(container, place);
  container.setAttribute("aria-busy", "true");
  const before = container.firstChild;
  const said = (/** @type {any} */ { title, message, requestId }) => [title, message, requestId && `Request id ${requestId}`].filter(Boolean).join(" · ");
  const shown = await cellOf(place, ask).then(
    (cell) => table(place, figures(cell)), (error) => make("p", { role: "alert" }, said(error)));
  if (latest.get(container) !== place || container.firstChild !== before) return;
  container.removeAttribute("aria-busy");
  container.replaceChildren(shown);
}

/** @param {Place} place @param {Line[]} lines */
function table({ picture, head, row, column }, lines) {
  const body = lines.map(([what, working, figure]) =>
    make("tr", {}, make("th", { scope: "row" }, what), make("td", {}, working), make("td", { class: "figure" }, figure)));
  const caption = `Head ${head}: query ${picture.rows[row]} (${row}), key ${picture.columns[column]} (${column})`;
  return make("table", { class: "arithmetic" }, make("caption", {}, caption), make("tbody", {}, ...body));
}

/** Ask the service for the cell: one request for each stage of the scores.
 * @param {Place} place @param {(body: object) => Promise<any>} ask @returns {Promise<Cell>} */
async function cellOf({ picture: { path, body, source, rows, sequences }, head, row, column }, ask) {
  // A layer shows its parts; without one the request has them.
  const { softcap = null, relative_bias, has_sinks } = path.startsWith("v1/layers/") ? await get(path.replace(/\/attend$/, "")) : body;
  const selected = { heads: [head], queries: [row] };
  const staged = (/** @type {string} */ stage, form = "heads") =>
    ask({ ...body, entropy: false, lse: true, encoding: "base64", weights: { form, ...selected }, scores: { stage, ...selected } });
  const [scaled, masked, capped] = await Promise.all([
    staged("scaled"), staged("masked", source.form), softcap === null ? null : staged("capped")]);
  const figure = (/** @type {any} */ tensor, /** @type {number} */ at) => {
    const floats = floatsOf(tensor);
    return floats[(floats.length / sequences) * (source.own?.sequence ?? 0) + at];
  };
  return {
    scaled: figure(scaled.scores, column),
    capped: capped && figure(capped.scores, column),
    softcap,
    masked: figure(masked.scores, column),
    lse: figure(scaled.lse, head * rows.length + row),
    weight: figure(scaled.weights, column),
    contribution: source.form === "contributions" ? figure(masked.weights, column) : null,
    hasBias: Boolean(relative_bias),
    hasSink: Boolean(has_sinks ?? body.sinks),
  };
}
