// Asks the service: the public API and nothing else, by addresses relative to this file, so that a path prefix changes nothing.

const API = new URL("../", import.meta.url);
const KEY = "attention-explore-key";

/** What the service said was wrong, in its own words. */
export class ServiceError extends Error {
  /** @param {string} title @param {string} detail @param {number} status @param {string | null} requestId @param {string | null} retryAfter */
  constructor(title, detail, status = 0, requestId = null, retryAfter = null) {
    super(detail);
    this.name = "ServiceError";
    this.title = title;
    this.detail = detail;
    this.status = status;
    this.requestId = requestId;
    this.retryAfter = retryAfter;
  }
}

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

/** Keeps the key until the tab is closed. @param {string} key */
export const keepApiKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** @param {string} path @param {RequestInit & { headers: Record<string, string> }} options */
async function send(path, options) {
  if (/[^\x21-\x7e]/.test(apiKey())) throw new ServiceError("This key cannot be sent", "A key has printable ASCII characters and no spaces.", 401);
  if (apiKey()) options.headers.authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(new URL(path, API), { ...options, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServiceError("The service does not answer", "No answer came from where this page was served. It may be stopped or restarting.");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => null);
  throw new ServiceError(
    problem?.title ?? `HTTP ${response.status}`,
    problem?.detail ?? "The answer does not come from the service itself; a proxy in front of it may have written it.",
    response.status, problem?.request_id ?? response.headers.get("x-request-id"), response.headers.get("retry-after"),
  );
}

/** @param {string} path @returns {Promise<any>} */
export async function get(path) {
  return (await send(path, { headers: { accept: "application/json" } })).json();
}

/** @param {string} accept @param {string} path @param {object} body @param {AbortSignal} [signal] */
const posted = (accept, path, body, signal) =>
  send(path, { method: "POST", headers: { accept, "content-type": "application/json" }, body: JSON.stringify(body), signal });

/** Posts a JSON body and reads the answer as JSON. @param {string} path @param {object} body @returns {Promise<any>} */
export const ask = async (path, body) => (await posted("application/json", path, body)).json();

/** Posts a JSON body and reads the answer as safetensors. @param {string} path @param {object} body @param {AbortSignal} [signal] */
export const post = async (path, body, signal) =>
  readSafetensors(await (await posted("application/vnd.safetensors", path, body, signal)).arrayBuffer());

/** @param {ArrayBuffer} buffer */
export function readSafetensors(buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  return {
    response: JSON.parse(header.__metadata__?.response ?? "{}"),
    /** @param {string} name */
    has: (name) => name in header,
    /** @param {string} name @returns {{ shape: number[], values: Float32Array }} */
    tensor(name) {
      const { dtype, shape, data_offsets: [from, to] } = header[name];
      return { shape, values: floats(dtype, buffer.slice(start + from, start + to)) };
    },
  };
}

/** @param {string} dtype @param {ArrayBuffer} bytes */
function floats(dtype, bytes) {
  if (dtype === "F32") return new Float32Array(bytes);
  if (dtype === "F64") return Float32Array.from(new Float64Array(bytes));
  halves ??= Float32Array.from({ length: 65536 }, (_, bits) => half(bits));
  const table = halves;
  return Float32Array.from(new Uint16Array(bytes), (bits) => table[bits]);
}

/** Every float16 by its bits. @type {Float32Array | null} */
let halves = null;

/** @param {number} bits */
function half(bits) {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, (bits & 1023) / 1024];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
}
