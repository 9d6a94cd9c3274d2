// The explorer's modules outside a browser: masks, pasted requests and the arithmetic of a cell. `node --test` runs it.
import assert from "node:assert/strict";
import { test } from "node:test";

const load = (name) => import(new URL(`../../../service/explore/${name}.js`, import.meta.url));
const [{ EXAMPLES }, { figures }, masks, request, { requestOf }] = await Promise.all(["examples", "arithmetic", "masks", "request", "picture"].map(load));
const { explainMask, ignoreMask, ofAnyText, slopeMask } = masks;
const { labelsOf, ownOf, parseRequest } = request;

test("masks are the API's own, and are said in words", () => {
  const sizes = { rows: 2, columns: 3 };
  assert.deepEqual(slopeMask(-2, true, sizes), { kind: "bias", axes: "ls", values: [[0, -2, -4], [2, 0, -2]] });
  const large = slopeMask(0.5, false, { rows: 200, columns: 200 });
  assert.deepEqual([...masks.floatsOf(large.values)].slice(198, 202), [-99, -99.5, -0.5, 0]);
  const said = [
    [slopeMask(0.1, false, sizes), "-0.1 × the distance"], [slopeMask(-2, true, sizes), "-2 × (key − query)"], [large, "-0.5 × the distance"],
    [{ kind: "causal", align: "bottom_right" }, "last query"], [{ kind: "lengths", values: 4 }, "4"], [ignoreMask([0, 2], 3), "a, c"],
    [{ kind: "window", left: 1, right: null, offset: -2 }, "1 key before and all keys after its own; query 0 stands at key -2"],
  ];
  for (const [mask, words] of said) assert.ok(explainMask(mask, ["a", "b", "c"]).includes(words), words);
  assert.equal(ignoreMask([], 3), null);
  assert.deepEqual(ofAnyText(said.map(([mask]) => mask)).map(({ kind }) => kind), ["causal", "lengths", "window"]);
});

test("a bias that is no slope is not said to be one, whatever its values are", () => {
  const odd = [null, 1, [], [[]], [[1, "x"]], { data: "%", dtype: "float32", shape: [1e9, 1e9] }, { shape: 3 }, [[0, -1], [5, 0]]];
  for (const values of odd) assert.equal(explainMask({ kind: "bias", axes: "ls", values }), "Bias: numbers that are added to the scaled scores");
});

/** A safetensors file of one byte an element. */
function safetensors(tensors, metadata) {
  const entries = Object.entries(tensors).map(([name, [dtype, shape, length]], i) => [name, { dtype, shape, data_offsets: [i * 8, i * 8 + length] }]);
  const header = new TextEncoder().encode(JSON.stringify({ ...Object.fromEntries(entries), ...(metadata !== undefined && { __metadata__: typeof metadata === "object" ? metadata : { request: metadata } }) }));
  const bytes = new Uint8Array(8 + header.length + entries.length * 8).map((_, i) => i);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(header.length), true);
  bytes.set(header, 8);
  return bytes;
}

test("a safetensors file becomes the same request in JSON", () => {
  const file = safetensors({ query: ["F16", [2, 2], 8], "masks.0.values": ["BOOL", [2, 2], 4] }, '{"masks": [{"kind": "attend"}], "lse": true}');
  const { body } = parseRequest(file);
  assert.deepEqual(body.query, { dtype: "float16", shape: [2, 2], data: Buffer.from(file.slice(-16, -8)).toString("base64") });
  assert.deepEqual(body.masks, [{ kind: "attend", values: { dtype: "bool", shape: [2, 2], data: Buffer.from(file.slice(-8, -4)).toString("base64") } }]);
});

test("a saved request has labels, in the metadata of a file or beside the request in JSON", () => {
  const body = { query: [[1], [2]], positions: [4, 5] };
  const labels = { labels: ["a", " b"], key_labels: ["c"] };
  const found = { rows: ["a", " b"], columns: ["c"] };
  assert.deepEqual(parseRequest(new TextEncoder().encode(JSON.stringify({ request: body, ...labels }))), { body, ...found });
  const file = safetensors({ query: ["F32", [1, 1], 4], positions: ["I64", [1], 8] }, { labels: '["a", " b"]', key_labels: '["c"]', format: "pt" });
  const { body: { positions }, ...read } = parseRequest(file);
  assert.deepEqual([positions.dtype, read], ["int64", found]);
  assert.deepEqual(parseRequest(new TextEncoder().encode(JSON.stringify(body))), { body, rows: [], columns: [] });
});

test("the masked scores of a layer are asked for, since it may have masks of its own", () => {
  const asked = (path) => requestOf({ own: { path, body: { query: [[1]] } }, masks: [], form: "heads" }, [2], "float32").body;
  assert.deepEqual(asked("v1/layers/a/attend").scores, { stage: "masked", heads: [2], dtype: "float32" });
  assert.deepEqual([asked("v1/attention").scores, asked("v1/layers/a/attend").masks], [undefined, undefined]);
});

const [bytes, one] = [(text) => new TextEncoder().encode(text), ["F32", [1, 1], 4]];
for (const [data, words] of [
  [bytes(""), /neither JSON nor/], [bytes('{"query": [[1'), /neither JSON nor/], [new Uint8Array([255, 254]), /neither JSON nor/],
  [bytes("[]"), /JSON object/], [bytes("null"), /JSON object/], [bytes("{}"), /no "query"/], [bytes('{"query": [[1]], "masks": [null]}'), /"masks"/], [new Uint8Array(2 ** 24 + 1), /16 MiB/],
  [safetensors({ query: ["U8", [1, 1], 1] }), /dtype/], [safetensors({ query: ["F32", [1, 1], 99] }), /does not have/],
  [safetensors({ query: one, "masks.3.values": one }), /no entry/], [safetensors({ query: one }, "[]"), /JSON object/],
  [safetensors({ query: one }, "{"), /not JSON/], [safetensors({ query: one }, 7), /JSON object/], [safetensors({ key: one }), /no "query"/],
  [bytes('{"request": {"query": [[1]]}, "labels": "ab"}'), /lists of texts/], [safetensors({ query: one }, { key_labels: "[1]" }), /lists of texts/],
  [safetensors({ query: one }, { labels: "[" }), /"labels" .* is not JSON/],
]) {
  test(`what is no request is said in plain words: ${words}`, () => assert.throws(() => parseRequest(data), { message: words }));
}

test("an own request keeps what decides its figures; labels are lines, or words of one line", () => {
  const body = { query: [[1]], layout: "bld", weights: "mean", encoding: "list" };
  assert.deepEqual(ownOf("v1/attention", body, ["a"], [], 1), { path: "v1/attention", body: { query: [[1]], layout: "bld" }, rows: ["a"], columns: [], sequence: 1 });
  assert.deepEqual([" the cat ", "a b\nc\n", ""].map(labelsOf), [["the", "cat"], ["a b", "c"], []]);
});

test("the figures of a cell add up as they are shown, and give the weight of the service", () => {
  const number = (figure) => Number(figure.replaceAll("−", "-"));
  for (let n = 1; n < 400; n++) {
    const scores = Array.from({ length: 14 }, (_, j) => Math.fround(Math.sin(n * 14 + j) * (n % 40)));
    const softcap = n % 3 ? null : 20;
    const base = scores.map((score) => Math.fround(softcap ? softcap * Math.tanh(score / softcap) : score));
    const masked = base.map((score, j) => Math.fround(score - (j % 3) * 0.5));
    const lse = Math.log(masked.reduce((sum, score) => sum + Math.exp(score), 0));
    const weight = Math.fround(Math.exp(masked[1] - lse));
    const lines = figures({ scaled: scores[1], capped: softcap && base[1], softcap, masked: masked[1], lse: Math.fround(lse), weight, contribution: weight * 1.7 });
    const shown = Object.fromEntries(lines.map(([what, , figure]) => [what, number(figure)]));
    const from = shown["capped score"] ?? shown["scaled score"];
    assert.ok(Math.abs(from + shown["masks add"] - shown.score) < 1e-9);
    const digits = lines.find(([what]) => what === "weight")[2].replace(/e.*/, "").replace(/^0?\.0*/, "").replace(".", "").length;
    assert.equal((shown["exp(score)"] / shown["the row's sum of exp"]).toPrecision(digits), shown.weight.toPrecision(digits));
    assert.equal(weight.toPrecision(digits), shown.weight.toPrecision(digits));
    assert.equal((shown.weight * shown["‖v · W_O‖, without a layer ‖v‖"]).toPrecision(3), shown.contribution.toPrecision(3));
  }
});

test("a blocked cell, scores that exp cannot hold and a weight below float32 have figures too", () => {
  const cell = { scaled: 1.5, capped: null, softcap: null, lse: 2, contribution: 0 };
  assert.deepEqual(figures({ ...cell, masked: -Infinity, weight: 0 }).slice(1), [["masks add", "a mask blocks this cell", "−∞"], ["weight", "exp(−∞) = 0", "0.00"]]);
  assert.deepEqual(figures({ ...cell, scaled: 9000, masked: 9000, lse: 9000.5, weight: 0.60653 }).at(-3), ["weight", "exp(−0.5000)", "0.607"]);
  assert.deepEqual(figures({ ...cell, masked: 1.5, lse: 300, weight: 0 }).at(-1)?.[0], "weight ≈");
});

test("what a layer adds to a score, and its sink in the row's sum, are said where it has them", () => {
  const cell = { scaled: 1, capped: null, softcap: null, masked: 1.5, lse: 2, weight: Math.fround(Math.exp(-0.5)), contribution: null };
  const names = (parts) => figures({ ...cell, ...parts }).map(([what]) => what);
  assert.deepEqual(names({}).slice(1), ["masks add", "score", "exp(score)", "the row's sum of exp", "weight"]);
  const said = names({ hasBias: true, hasSink: true });
  assert.deepEqual([said[1], said[4]], ["the layer's bias and masks add", "the row's sum of exp and of the sink"]);
});

test("there are six examples, and the animal and the street come first", () => {
  assert.equal(EXAMPLES.length, 6);
  const { text, layer, head, row, column, weight } = EXAMPLES[0];
  assert.deepEqual([text.split(" ")[row - 1], text.split(" ")[column - 1], layer, head, weight], ["it", "animal", 3, 1, 0.653]);
});
