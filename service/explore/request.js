// Own requests: what is pasted or dropped becomes a request of the API, without a model; faults are said in plain words.

import { labelled, make } from "./dom.js";
import { base64 } from "./masks.js";
import { get } from "./service.js";

/** @typedef {import("./picture.js").Own} Own */

const MAX_MIB = 16;
const DTYPES = new Map(Object.entries({
  F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64", BOOL: "bool", I32: "int32", I64: "int64" }));
/** What the picture itself asks for. */
const CHOSEN = ["weights", "scores", "lse", "entropy", "encoding", "present"];

/** A request with the labels of its rows and keys, empty where it has none.
 * @typedef {{ body: Record<string, any>, rows: string[], columns: string[] }} Saved */

/** Return a saved request: JSON text, or a safetensors file, whose tensors become base64 (the same bits).
 * Labels stand beside the request: in the file's metadata, or in {"request": …, "labels": […], "key_labels": […]}.
 * @param {Uint8Array} bytes @returns {Saved} @throws {Error} in plain words */
export function parseRequest(bytes) {
  const length = bytes.length > 8 ? Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true)) : Infinity;
  const isSafetensors = bytes[8] === 0x7b && length <= bytes.length - 8;
  const size = bytes.length * (isSafetensors ? 4 / 3 : 1) / 2 ** 20;
  if (size > MAX_MIB) throw new Error(`The request would have ${size.toFixed(1)} MiB as JSON; at most ${MAX_MIB} MiB fit.`);
  const found = isSafetensors ? ofSafetensors(bytes, length) : ofText(bytes, "This is neither JSON nor a safetensors file");
  const { request: body, labels, key_labels } = isObject(found?.request) ? found : { request: found };
  if (!isObject(body)) throw new Error('A request is a JSON object, like {"query": [[1, 0], [0, 1]]}.');
  if (body.query === undefined) throw new Error('The request has no "query"; it is the only field that every request has.');
  if (body.masks !== undefined && !(Array.isArray(body.masks) && body.masks.every(isObject))) throw new Error('"masks" must be a list of objects.');
  return { body, rows: textsOf(labels), columns: textsOf(key_labels) };
}

/** @param {unknown} labels @returns {string[]} */
function textsOf(labels = []) {
  if (Array.isArray(labels) && labels.every((label) => typeof label === "string")) return labels;
  throw new Error('"labels" and "key_labels" must be lists of texts.');
}

/** @param {unknown} value @returns {value is Record<string, any>} */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @param {Uint8Array} bytes @param {string} complaint */
function ofText(bytes, complaint) {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (error) {
    throw new Error(`${complaint}: ${error instanceof Error ? error.message : error}`);
  }
}

/** @param {Uint8Array} bytes @param {number} length of the header @returns {Record<string, any>} */
function ofSafetensors(bytes, length) {
  const { __metadata__: metadata = {}, ...tensors } = ofText(bytes.subarray(8, 8 + length), "The header of the safetensors file is not JSON");
  const [fields, labels, key_labels] = ["request", "labels", "key_labels"].map((name) =>
    ofText(new TextEncoder().encode(metadata?.[name] ?? (name === "request" ? "{}" : "[]")), `The metadata "${name}" of the safetensors file is not JSON`));
  if (!isObject(fields)) throw new Error('The metadata "request" of the safetensors file must be a JSON object.');
  for (const [name, tensor] of Object.entries(tensors)) {
    const [start, end] = tensor?.data_offsets ?? [];
    if (!(start >= 0 && start <= end && end <= bytes.length - 8 - length) || !Array.isArray(tensor.shape)) {
      throw new Error("The header of the safetensors file names bytes that the file does not have.");
    }
    const dtype = DTYPES.get(tensor.dtype);
    if (!dtype) throw new Error(`A tensor has a dtype that the API does not take; it takes ${[...DTYPES.keys()].join(", ")}.`);
    const value = { dtype, shape: tensor.shape, data: base64(bytes.subarray(8 + length + start, 8 + length + end)) };
    const index = /^masks\.(\d+)\.values$/.exec(name)?.[1];
    if (index === undefined) fields[name] = value;
    else if (isObject(fields.masks?.[Number(index)])) fields.masks[Number(index)].values = value;
    else throw new Error(`The tensor masks.${index}.values belongs to no entry of "masks" in the metadata "request".`);
  }
  return { request: fields, labels, key_labels };
}

/** Return the own request, without what the picture itself asks for.
 * @param {string} path @param {Record<string, any>} body @param {string[]} rows labels, empty for numbers @param {string[]} columns
 * @param {number} sequence the one of a batch that is drawn @returns {Own} */
export function ownOf(path, body, rows, columns, sequence) {
  const kept = Object.fromEntries(Object.entries(body).filter(([name]) => !CHOSEN.includes(name)));
  return { path, body: kept, rows, columns, sequence };
}

/** Labels are lines, or words where there is one line. @param {string} text */
export const labelsOf = (text) => (text.trim().includes("\n") ? text.trim().split(/\r?\n/) : text.split(/\s+/).filter(Boolean));

/** Show the controls for an own request. @param {HTMLElement} container @param {(own: Own) => void} onRequest */
export const ownRequest = (container, onRequest) => container.replaceChildren(new OwnForm(onRequest).form());

class OwnForm {
  target = make("select", {}, make("option", { value: "v1/attention" }, "v1/attention: own query, key and value"));
  pasted = make("textarea", { rows: 5, spellcheck: "false", placeholder: '{"query": [[1, 0], [0, 1]], …}' });
  file = make("input", { type: "file", accept: ".json,.safetensors" });
  rows = make("textarea", { rows: 2, spellcheck: "false" });
  columns = make("textarea", { rows: 2, spellcheck: "false" });
  sequence = make("input", { type: "number", min: 0, value: 0 });
  status = make("p", { role: "status" });
  /** @type {Saved | null} */
  saved = null;

  /** @param {(own: Own) => void} onRequest */
  constructor(onRequest) {
    this.onRequest = onRequest;
    this.fill().catch(() => {}); // asked again when the list is used: a key may be missing until then
  }

  form() {
    const say = (/** @type {unknown} */ error) => this.attempt(() => { throw error; });
    this.pasted.addEventListener("input", () => this.take(new TextEncoder().encode(this.pasted.value)));
    this.file.addEventListener("change", () => this.read(this.file.files?.[0]).catch(say));
    this.target.addEventListener("focus", () => this.fill().catch(say));
    const handled = (/** @type {(event: any) => void} */ act) => (/** @type {Event} */ event) => { event.preventDefault(); act(event); };
    const draw = () => this.attempt(() => {
      if (!this.saved) throw new Error("Paste a request, or choose a file.");
      const { body, ...labels } = this.saved;
      const typed = [this.rows, this.columns].map(({ value }) => labelsOf(value));
      const [rows, columns] = typed.some(({ length }) => length) ? typed : [labels.rows, labels.columns];
      this.onRequest(ownOf(this.target.value, body, rows, columns, Number(this.sequence.value)));
    });
    const drop = (/** @type {DragEvent} */ event) => this.read(event.dataTransfer?.files[0]).catch(say);
    return make("form", { class: "own-request", onsubmit: handled(draw), ondrop: handled(drop), ondragover: handled(() => {}) },
      labelled("Send to", this.target), labelled("Request: paste JSON", this.pasted),
      labelled("or choose or drop a JSON or safetensors file", this.file), labelled("Labels of the query rows (optional)", this.rows),
      labelled("Labels of the keys (optional)", this.columns), labelled("Sequence of a batch", this.sequence), make("button", {}, "Draw"), this.status);
  }

  /** Say what is wrong if the work fails. @template Found @param {() => Found} work */
  attempt(work) {
    this.status.textContent = "";
    try {
      return work();
    } catch (error) {
      this.status.textContent = error instanceof Error ? error.message : String(error);
      return null;
    }
  }

  /** @param {Uint8Array} bytes */
  take(bytes) {
    this.saved = this.attempt(() => (bytes.length ? parseRequest(bytes) : null));
    if (this.saved) this.status.textContent = `The request is read${this.saved.rows.length ? `, with ${this.saved.rows.length} labels` : ""}.`;
  }

  /** @param {File | undefined} found */
  async read(found) {
    this.pasted.value = "";
    // One byte above the limit is enough to be refused.
    if (found) this.take(new Uint8Array(await found.slice(0, MAX_MIB * 2 ** 20 + 1).arrayBuffer()));
  }

  async fill() {
    if (this.target.length > 1) return;
    const { layers } = await get("v1/layers");
    this.target.prepend(...layers.map((/** @type {{ name: string }} */ { name }) =>
      make("option", { value: `v1/layers/${name}/attend` }, `layer ${name}`)));
  }
}
