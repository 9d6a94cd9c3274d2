// One side becomes one request, and its answer a picture: tables of figures with the names of their rows and columns.

import { post, ServiceError } from "./service.js";

/** A token as the API tells of it.
 * @typedef {{ text: string, id: number, offsets: [number, number] | null, sequence: number | null }} Token */
/** A pasted request: its route (`v1/layers/minilm-l3/attend` or `v1/attention`), its JSON body, and names for its rows (queries)
 * and columns (keys); an empty list means their numbers. One sequence of a batch is drawn.
 * @typedef {{ path: string, body: Record<string, any>, rows: string[], columns: string[], sequence: number }} Own */
/** Everything that decides a picture, and nothing else; the address holds it.
 * @typedef {{ model: string, text: string, pair: string, layer: number, head: number, form: "heads" | "contributions",
 *   masks: Record<string, any>[], own: Own | null }} Side */
/** @typedef {{ a: Side, b: Side | null, view: "a" | "b" | "difference", hideSpecial: boolean, row: number | null,
 *   column: number | null, sort: string }} State */
/** What one request answered: H heads, L query rows, S keys. `tables` and `masked` hold the heads that were asked for, row-major;
 * `masked` is 1 where a mask forbids, and empty without masks; `special` is of columns; `entropy` is [H, L] of all heads.
 * `body` is the request as sent, `path` its route relative to the page.
 * @typedef {{ source: Side, rows: string[], columns: string[], special: boolean[], numHeads: number, sequences: number,
 *   tables: Map<number, Float32Array>, masked: Map<number, Uint8Array>, entropy: Float32Array | null,
 *   tokens: Token[] | null, layerName: string, body: Record<string, any>, path: string }} Picture */
/** What the large matrix shows: a selection of a picture, or the difference of two; `rowsAt` and `columnsAt` are their places there.
 * @typedef {{ title: string, rows: string[], columns: string[], rowsAt: number[], columnsAt: number[], values: Float32Array,
 *   masked: Uint8Array | null, scale: import("./scale.js").Scale }} Drawn */
/** A place in what is drawn: what is pointed at. @typedef {{ row: number | null, column: number | null }} Cursor */

/** The request of a side for some of its heads. The page shows the figures of float32, and thumbnails in float16.
 * @param {Side} side @param {number[] | null} heads null: all @param {"float32" | "float16"} dtype
 * @returns {{ path: string, body: Record<string, any> }} */
export function requestOf(side, heads, dtype) {
  const some = heads === null ? {} : { heads };
  const wanted = { weights: { form: side.form, ...some, dtype }, entropy: true };
  /** @type {{ path: string, body: Record<string, any> }} */
  const { path, body } = side.own ?? {
    path: `v1/models/${encodeURIComponent(side.model)}/attend`,
    body: { text: side.text, ...(side.pair ? { text_pair: side.pair } : {}), layer: side.layer },
  };
  const masks = [...(body.masks ?? []), ...side.masks];
  // A layer may have masks of its own; those of the models here have none.
  const hasMasks = masks.length > 0 || path.startsWith("v1/layers/");
  const scores = hasMasks ? { scores: { stage: "masked", ...some, dtype: "float32" } } : {};
  return { path, body: { ...body, ...wanted, ...(masks.length ? { masks } : {}), ...scores } };
}

/** Asks the service for the picture of a side.
 * @param {Side} side @param {number[] | null} heads @param {"float32" | "float16"} dtype @param {AbortSignal} [signal]
 * @returns {Promise<Picture>} */
export async function fetchPicture(side, heads, dtype, signal) {
  const { path, body } = requestOf(side, heads, dtype);
  const answer = await post(path, body, signal);
  const weights = answer.tensor("weights");
  const [L, S] = weights.shape.slice(-2);
  const sequences = weights.shape.length > (body.layout === "bld" ? 2 : 3) ? weights.shape[0] : 1;
  const { sequence = 0, rows = [], columns = [] } = side.own ?? {};
  if (sequence >= sequences) throw new ServiceError("No such sequence", `The answer has the sequences 0 to ${sequences - 1}.`);
  const part = (/** @type {string} */ name) => {
    const { values } = answer.tensor(name);
    return values.subarray((values.length / sequences) * sequence, (values.length / sequences) * (sequence + 1));
  };
  const entropy = part("entropy");
  const numHeads = entropy.length / L;
  const shown = heads ?? Array.from({ length: numHeads }, (_, head) => head);
  const tables = cut(shown, part("weights"), L * S);
  const masked = new Map();
  if (answer.has("scores")) {
    for (const [head, scores] of cut(shown, part("scores"), L * S)) {
      masked.set(head, Uint8Array.from(scores, (score) => Number(score === -Infinity)));
    }
  }
  /** @type {Token[] | null} */
  const tokens = answer.response.tokens ?? null;
  const texts = tokens?.map((token) => token.text) ?? null;
  return {
    source: side, path, body, tokens, numHeads, sequences, tables, masked,
    rows: named(texts ?? rows, L, "query rows"),
    columns: named(texts ?? (columns.length || L !== S || body.key != null ? columns : rows), S, "keys"),
    special: Array.from({ length: S }, (_, at) => (tokens ? tokens[at]?.offsets === null : false)),
    entropy,
    layerName: answer.response.layer.name,
  };
}

/** The tables of one sequence by their heads.
 * @param {number[]} heads @param {Float32Array} values @param {number} size */
function cut(heads, values, size) {
  return new Map(heads.map((head, at) => [head, values.subarray(at * size, (at + 1) * size)]));
}

/** The labels, or numbers where there are none. @param {string[]} labels @param {number} size @param {string} what */
function named(labels, size, what) {
  if (labels.length && labels.length !== size) throw new ServiceError("The labels do not fit", `There are ${labels.length} labels for ${size} ${what}.`);
  return Array.from({ length: size }, (_, at) => labels[at] ?? String(at));
}
