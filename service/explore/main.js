// The page: a state, the pictures that it asks for, and what is drawn of them. Every change of a picture is an entry of the history.

import { readAddress, sideOf, SORTS, writeAddress } from "./address.js";
import { arithmetic } from "./arithmetic.js";
import { bothInWords, compareBar, difference, drawnOf, editedSide, inWords, largest } from "./compare.js";
import { make } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { exportMenu } from "./export.js";
import { entropyOf, sayFigure } from "./figure.js";
import { MaskEditor, ofAnyText } from "./masks.js";
import { Matrix } from "./matrix.js";
import { fetchPicture, requestOf } from "./picture.js";
import { ownRequest } from "./request.js";
import { apiKey, ask, get, keepApiKey, ServiceError } from "./service.js";
import { SORT_NAMES, thumbnails } from "./thumbnails.js";
import { TokenChips } from "./tokens.js";

/** @typedef {import("./picture.js").Side} Side */
/** @typedef {import("./picture.js").State} State */
/** @typedef {import("./picture.js").Picture} Picture */
/** @typedef {import("./picture.js").Drawn} Drawn */
/** @typedef {import("./picture.js").Cursor} Cursor */
/** @typedef {{ name: string, layers: string[], heads: number[], fault: string | null }} Model */

const MOST_TOKENS = 128;
const dark = matchMedia("(prefers-color-scheme: dark)");
/** Of what a history entry holds. */
const VERSION = 1;
const NOWHERE = { row: null, column: null };

/** @template {HTMLElement} [T=HTMLElement] @param {string} id @returns {T} */
const part = (id) => /** @type {T} */ (document.getElementById(id));
const field = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ (part(id));

/** @type {Model[]} */ let models = [];
let state = remembered(history.state);
/** The pictures shown: both sides, and all heads of the edited one in its layer and in all layers, as far as they were asked for.
 * @type {{ a: Picture | null, b: Picture | null, heads: Picture | null, layers: Picture[] }} */
let shown = { a: null, b: null, heads: null, layers: [] };
/** @type {{ a: Drawn | null, b: Drawn | null, difference: Drawn | string | null }} */
let drawn = { a: null, b: null, difference: null };
/** @type {Cursor} */ let cursor = NOWHERE;
/** How many masks went with the sentence whose tokens they had listed. */
let lostMasks = 0;
let asking = new AbortController();
/** Answers by their requests, the latest last. @type {Map<string, Picture>} */
const answers = new Map();

const chips = new TokenChips(part("tokens"), { point, lock: (row) => lock({ row, column: null }) });
const masks = new MaskEditor(part("masks"), (changed) => edit({ masks: changed }));
const matrix = new Matrix(part("matrix"), { point, lock });

/** @param {Side} side @param {number[] | null} heads @param {"float32" | "float16"} dtype */
async function pictureOf(side, heads, dtype) {
  const key = JSON.stringify([requestOf(side, heads, dtype), side.own?.sequence, side.own?.rows, side.own?.columns]);
  const found = answers.get(key) ?? (await fetchPicture(side, heads, dtype, asking.signal));
  answers.delete(key);
  answers.set(key, found);
  if (answers.size > 40) answers.delete(answers.keys().next().value ?? "");
  return found;
}

/** Whether a picture of all heads is still one of the side. @param {Picture | null} old @param {Side} side @param {Partial<Side>} [also] */
const isOf = (old, side, also) => old !== null && JSON.stringify({ ...old.source, head: 0, ...also }) === JSON.stringify({ ...side, head: 0, ...also });

/** The state of a history entry, or of the address where it has none. @param {any} entry @returns {State} */
function remembered(entry) {
  return entry?.version === VERSION ? entry.state : readAddress(location.hash);
}

/** Goes to a changed state. @param {Partial<State>} change @param {boolean} [isStep] whether Back leads to where it was */
function go(change, isStep = true) {
  state = { ...state, ...change };
  const { fragment, complete } = writeAddress(state);
  part("partial").hidden = complete;
  try {
    history[isStep && fragment !== location.hash ? "pushState" : "replaceState"]({ version: VERSION, state }, "", fragment);
  } catch {
    history.replaceState(null, "", "#"); // more than the browser keeps in its history
  }
}

/** The state with a changed side, and with what was typed for it. @param {Partial<Side>} change @returns {State} */
function edited(change) {
  const before = editedSide(state);
  const [text, pair] = [field("text").value, field("pair").value];
  const isNew = !before.own && (text !== before.text || pair !== before.pair);
  const typed = isNew ? { text, pair, masks: ofAnyText(before.masks) } : {};
  const side = { ...before, ...typed, ...change };
  lostMasks = isNew && !change.masks ? before.masks.length - side.masks.length : 0;
  return { ...state, ...(before === state.a ? { a: side } : { b: side }), ...(isNew ? NOWHERE : {}) };
}

/** Changes the edited side. @param {Partial<Side>} change @param {Partial<State>} [also] */
function edit(change, also = {}) {
  go({ ...edited(change), ...also });
  load();
}

/** Asks for the pictures of the state and draws them. */
async function load() {
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  fill();
  /** @type {ReturnType<typeof setTimeout> | undefined} */ let waits;
  part("picture").setAttribute("aria-busy", "true");
  const settled = () => {
    clearTimeout(waits);
    wait("");
    part("picture").removeAttribute("aria-busy");
  };
  try {
    const words = `Asking for ${inWords(editedSide(state))} …`;
    waits = setTimeout(() => wait(words), 150);
    if (!models.length) models = (await get("v1/models")).models;
    if (signal.aborted) return;
    settle();
    fillChoices();
    if (!editedSide(state).own && !models.length) {
      part("own-box").setAttribute("open", "");
      throw new ServiceError("No model is stored here", "Import one: attention-service models import DIR --name minilm. Without one, paste a request of your own below.");
    }
    const one = (/** @type {Side | null} */ side) => side && pictureOf(side, [side.head], "float32");
    const [a, b] = await Promise.all([one(state.a), one(state.b)]);
    if (signal.aborted) return;
    const [side, { heads, layers }] = [editedSide(state), shown];
    shown = { a, b, heads: isOf(heads, side) ? heads : null, layers: isOf(layers[0] ?? null, side, { layer: 0 }) ? layers : [] };
    report(null);
    draw();
    settled();
    fillChoices();
    await loadHeads(signal).catch((error) => signal.aborted || report(error, false));
  } catch (error) {
    if (!signal.aborted) report(error);
  } finally {
    if (!signal.aborted) settled();
    clearTimeout(waits);
  }
}

/** Asks, and again, at most twice, where a busy service says to wait for up to two seconds.
 * @param {() => Promise<Picture>} asks @param {AbortSignal} signal @returns {Promise<Picture>} */
async function patiently(asks, signal, tries = 2) {
  try {
    return await asks();
  } catch (error) {
    const waitS = error instanceof ServiceError && error.retryAfter ? Number(error.retryAfter) : NaN;
    if (signal.aborted || !tries || !(waitS <= 2)) throw error;
    await new Promise((resolve) => setTimeout(resolve, waitS * 1000));
    return patiently(asks, signal, tries - 1);
  }
}

/** Asks for all heads of the edited side, and of all layers where they are open. @param {AbortSignal} signal @param {boolean} [isWanted] */
async function loadHeads(signal, isWanted = false) {
  const side = editedSide(state);
  const picture = side === state.b ? shown.b : shown.a;
  if (!picture) return;
  if (Math.max(picture.rows.length, picture.columns.length) > MOST_TOKENS && !isWanted) return offerHeads(picture);
  const heads = await patiently(() => pictureOf(side, null, "float16"), signal);
  if (signal.aborted) return;
  shown.heads = heads;
  draw();
  if (!field("all-layers").hasAttribute("open") || side.own) return;
  for (const layer of modelOf(side)?.layers.keys() ?? []) {
    const found = await patiently(() => pictureOf({ ...side, layer, head: 0 }, null, "float16"), signal);
    if (signal.aborted) return;
    shown.layers[layer] = found;
    drawHeads();
  }
}

/** @param {Picture} picture */
function offerHeads({ rows, columns, numHeads }) {
  const size = ((rows.length * columns.length * numHeads * 2) / 2 ** 20).toFixed(1);
  const draws = () => loadHeads(asking.signal, true).catch(report);
  part("heads").replaceChildren(
    make("p", { class: "quiet" }, `Above ${MOST_TOKENS} tokens only the selected head is asked for.`),
    make("button", { type: "button", id: "heads-draw", onclick: draws }, `Draw all ${numHeads} heads (${size} MiB)`));
  part("layers").replaceChildren();
}

const modelOf = (/** @type {Side} */ side) => models.find(({ name }) => name === side.model);

/** Brings layers and heads of both sides into what their models have. */
function settle() {
  const settled = (/** @type {Side} */ side) => {
    if (side.own || !models.length) return side;
    const model = modelOf(side) ?? (side.model ? undefined : models[0]);
    if (!model) return side;
    const layer = Math.min(side.layer, model.layers.length - 1);
    return { ...side, model: model.name, layer, head: Math.min(side.head, model.heads[layer] - 1) };
  };
  state = { ...state, a: settled(state.a), b: state.b && settled(state.b) };
}

/** The picture that the large matrix shows, null: a difference. */
const pictureShown = () => (state.view === "difference" ? null : shown[state.view]);

/** Draws the pictures that are there. */
function draw() {
  const { a, b } = shown;
  if (!a) return;
  part("picture").hidden = false;
  const scaleOf = (/** @type {Picture} */ picture) => ({
    kind: /** @type {const} */ ("sequential"), dark: dark.matches, max: largest(picture.source.form, [a, b, shown.heads, ...shown.layers.filter(Boolean)]) });
  const [first, second] = [a, b].map((picture) => picture && drawnOf(picture, state.hideSpecial, scaleOf(picture)));
  drawn = { a: first, b: second, difference: first && second && difference(first, second, state) };
  const main = drawn[state.view];
  keepFocus(part("compare"), () => compareBar(part("compare"), state, drawn, (change) => { const now = edited({}); go({ ...now, ...change(now) }); load(); }));
  part("sides").textContent = bothInWords(state);
  const isDrawn = main !== null && typeof main !== "string";
  part("matrix").hidden = part("tokens").hidden = part("table").hidden = !isDrawn;
  part("display").textContent = [
    typeof main === "string" ? main : state.hideSpecial && "Special tokens are hidden, not masked: nothing is renormalised, so the figures shown of a row add up to less.",
    lostMasks && "Masks that had listed the tokens of the sentence before went with it.",
  ].filter(Boolean).join(" ");
  if (isDrawn) {
    matrix.draw(main);
    chips.draw(main);
  } else part("figure").textContent = part("about").textContent = "";
  const picture = /** @type {Picture} */ (editedSide(state) === state.b ? b : a);
  masks.show(editedSide(state), picture);
  drawHeads();
  point(null);
  drawCell();
}

/** Draws the thumbnails, on the scale of the large matrix. */
function drawHeads() {
  const { heads, layers } = shown;
  const side = editedSide(state);
  const scale = drawn[side === state.b ? "b" : "a"]?.scale;
  if (!scale) return;
  const how = { sort: state.sort, chosen: side.head, prefix: "head-", choose: (/** @type {number} */ head) => edit({ head }) };
  if (heads) keepFocus(part("heads"), () => thumbnails(part("heads"), heads, scale, how));
  keepFocus(part("layers"), () => part("layers").replaceChildren(...layers.flatMap((picture, layer) => {
    const row = make("div", {});
    const chosen = layer === side.layer ? side.head : null;
    thumbnails(row, picture, scale, { ...how, chosen, prefix: `layer-${layer}-`, choose: (head) => edit({ layer, head }) });
    return [make("h3", {}, `Layer ${layer}`), row];
  })));
}

/** Shows the arithmetic and the table's row of the locked cell. */
function drawCell() {
  const [main, picture] = [drawn[state.view], pictureShown()];
  if (main === null || typeof main === "string") return;
  const { row, column } = state;
  matrix.table(part("cells"), locked().row, (at) => (picture ? entropyOf(picture, main.rowsAt[at]) : ""));
  if (!picture) part("arithmetic").replaceChildren(make("p", { class: "quiet" }, "The arithmetic is of A or of B: choose one of them."));
  else if (row === null || column === null || row >= picture.rows.length || column >= picture.columns.length) {
    part("arithmetic").replaceChildren(make("p", { class: "quiet" }, "Click a cell, or press Enter on it, to see how its weight comes about."));
  } else arithmetic(part("arithmetic"), picture, picture.source.head, row, column, (body) => ask(picture.path, body));
}

/** The locked cell as places of what is drawn. @returns {Cursor} */
function locked() {
  const main = drawn[state.view];
  if (main === null || typeof main === "string") return NOWHERE;
  const at = (/** @type {number[]} */ places, /** @type {number | null} */ place) => (place === null || !places.includes(place) ? null : places.indexOf(place));
  return { row: at(main.rowsAt, state.row), column: at(main.columnsAt, state.column) };
}

/** Points at a cell or token; null: back to what is locked. In the matrix a locked row stays. @param {Cursor | null} to */
function point(to) {
  const main = drawn[state.view];
  if (main === null || typeof main === "string") return;
  const held = locked();
  cursor = to ?? held;
  if (to && to.column !== null && held.row !== null && to.row !== null) cursor = { row: held.row, column: to.column };
  matrix.point(cursor, held.row);
  chips.point(cursor, held.row);
  sayFigure(part("figure"), part("about"), main, cursor, { ...drawn, picture: pictureShown(), isSame: chips.isSame });
}

/** Locks a row with a cell, or unlocks what was locked. @param {Cursor} cell */
function lock(cell) {
  const main = drawn[state.view];
  if (main === null || typeof main === "string" || cell.row === null) return;
  const held = locked();
  const isHeld = held.row === cell.row && held.column === cell.column;
  go(isHeld ? NOWHERE : { row: main.rowsAt[cell.row], column: cell.column === null ? null : main.columnsAt[cell.column] }, false);
  point(null);
  drawCell();
}

/** Shows what went wrong in the service's own words; null takes it away.
 * @param {any} error @param {boolean} [isStale] whether what is drawn is of an earlier answer */
function report(error, isStale = true) {
  const box = part("problem");
  part("picture").classList.toggle("stale", error !== null && isStale);
  if (error === null) return box.replaceChildren();
  const { title = "This page failed", detail = String(error), status, requestId, retryAfter } = error instanceof ServiceError ? error : {};
  const notes = [requestId && `Request id ${requestId}`, retryAfter && `it asks to wait ${retryAfter} s`, isStale && shown.a && "what is drawn below is the last answer"].filter(Boolean).join(" · ");
  box.replaceChildren(make("h2", {}, title), make("p", {}, detail), make("p", { class: "quiet" }, notes),
    make("button", { type: "button", id: "again", onclick: () => load() }, "Try again"), " ",
    ...(editedSide(state).masks.length ? [make("button", { type: "button", id: "unmask", onclick: () => edit({ masks: [] }) }, "Try without masks")] : []));
  if (status === 401 || status === 403) {
    part("key").setAttribute("open", "");
    field("key-value").focus();
  }
}

const wait = (/** @type {string} */ text) => (part("waiting").textContent = text);

/** Redraws a part and gives the focus back to the same control. @param {HTMLElement} container @param {() => void} redraw */
function keepFocus(container, redraw) {
  const id = container.contains(document.activeElement) ? document.activeElement?.id : "";
  redraw();
  if (id) part(id)?.focus();
}

/** @param {string} id @param {[string | number, string][]} options @param {string | number} chosen */
function choices(id, options, chosen) {
  const select = field(id);
  const isKnown = options.some(([value]) => String(value) === String(chosen));
  select.replaceChildren(...(isKnown ? options : [[chosen, String(chosen)], ...options]).map(([value, text]) => make("option", { value }, String(text))));
  select.value = String(chosen);
}

/** Writes the edited side into the controls. */
function fill() {
  const side = editedSide(state);
  field("text").value = side.text;
  field("pair").value = side.pair;
  field("form").value = side.form;
  field("hide").checked = state.hideSpecial;
  field("key-value").value = apiKey();
  part("own-name").textContent = side.own ? `A request of your own to ${side.own.path}` : "";
  for (const id of ["own-name", "own-end"]) part(id).hidden = !side.own;
  part("all").hidden = Boolean(side.own);
  for (const id of ["text", "pair", "model", "layer", "example", "hide"]) /** @type {HTMLElement} */ (part(id).parentElement).hidden = Boolean(side.own);
  fillChoices();
}

/** Writes what can be chosen; what was typed meanwhile stays. */
function fillChoices() {
  const side = editedSide(state);
  const model = side.own ? undefined : modelOf(side);
  const numHeads = model?.heads[side.layer] ?? (side === state.b ? shown.b : shown.a)?.numHeads ?? 0;
  const numbers = (/** @type {number} */ count) => Array.from({ length: count }, (_, at) => /** @type {[number, string]} */ ([at, String(at)]));
  choices("model", models.map(({ name, fault }) => [name, fault ? `${name} (unavailable)` : name]), side.model);
  choices("layer", numbers(model?.layers.length ?? 0), side.layer);
  choices("head", numbers(numHeads), side.head);
  choices("sort", SORTS.map((sort) => [sort, SORT_NAMES[sort]]), state.sort);
  const example = EXAMPLES.findIndex(({ text, pair, layer, head }) => !side.own && side.text === text && side.pair === pair && side.layer === layer && side.head === head);
  choices("example", [[-1, "own words"], ...EXAMPLES.map(({ title }, at) => /** @type {[number, string]} */ ([at, title]))], example);
}

function listen() {
  const changes = (/** @type {string} */ id, /** @type {(value: string) => void} */ act) => part(id).addEventListener("change", () => act(field(id).value));
  part("ask").addEventListener("submit", (event) => { event.preventDefault(); edit({}); });
  for (const id of ["text", "pair"]) part(id).addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); edit({}); }
  });
  changes("model", (model) => edit({ model }));
  changes("layer", (layer) => edit({ layer: Number(layer) }));
  changes("head", (head) => edit({ head: Number(head) }));
  changes("form", (form) => edit({ form: form === "contributions" ? form : "heads" }));
  changes("example", (at) => {
    const example = EXAMPLES[Number(at)];
    if (example) edit(sideOf(example, editedSide(state).model), { row: example.row, column: example.column });
  });
  changes("sort", (sort) => { go({ sort }, false); drawHeads(); });
  part("hide").addEventListener("change", () => { go({ hideSpecial: field("hide").checked }); draw(); });
  part("own-end").addEventListener("click", () => edit({ own: null, masks: [], head: 0 }, NOWHERE));
  part("all-layers").addEventListener("toggle", () => loadHeads(asking.signal).catch((error) => report(error, false)));
  part("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepApiKey(field("key-value").value.trim());
    answers.clear();
    models = [];
    load();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || (state.row === null && state.column === null)) return;
    go(NOWHERE, false);
    point(null);
    drawCell();
  });
  window.addEventListener("popstate", (event) => { state = remembered(event.state); lostMasks = 0; load(); });
  dark.addEventListener("change", draw);
  let room = 0;
  new ResizeObserver(() => {
    if (room !== document.body.clientWidth) draw();
    room = document.body.clientWidth;
  }).observe(document.body);
}

ownRequest(part("own"), (own) => {
  edit({ own, masks: [], head: 0 }, NOWHERE);
  part("ask").scrollIntoView();
});
exportMenu(part("export"), () => {
  const main = drawn[state.view];
  const pictures = state.view === "difference" ? [shown.a, shown.b] : [shown[state.view]];
  return !main || typeof main === "string" ? null : { pictures: pictures.flatMap((picture) => picture ?? []), drawn: main, canvas: matrix.canvas };
});
listen();
load();
