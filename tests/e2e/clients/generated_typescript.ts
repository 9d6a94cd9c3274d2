// A client typed by what openapi-typescript writes from /openapi.json: node generated_typescript.js <url>.
// tsc checks it, and fails where a line that `@ts-expect-error` announces as wrong is right.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

declare const process: { argv: string[] };

type Schemas = components["schemas"];

// The media types that it reads: JSON and problems, not safetensors.
const client = createClient<paths, `application/${string}json`>({ baseUrl: process.argv[2] });
const one = { params: { path: { layer: "small" } } };
const query = [0, 1, 2].map((row) => Array.from({ length: 16 }, (_, i) => Math.sin(row * 16 + i)));

function check(holds: boolean, what: string): asserts holds {
  if (!holds) throw new Error(what);
}

const listed = await client.GET("/v1/layers");
check(listed.data !== undefined, "the layers are listed");
const layer: Schemas["Layer"] | undefined = listed.data.layers.find((found) => found.name === "small");
check(layer?.query_width === 16, "a layer has its widths");

const masks: Schemas["Mask"][] = [
  { kind: "attend", values: [true, true, true] },
  { kind: "ignore", values: [false, false, false] },
  { kind: "bias", values: [0, 0, "-inf"], axes: "s" },
  { kind: "lengths", values: 3 },
  { kind: "causal", align: "top_left" },
  { kind: "window", left: 1, right: 0 },
];
const body: Schemas["AttendRequest"] = { query, masks, weights: { form: "top_k", k: 1, heads: [2] } };
const attended = await client.POST("/v1/layers/{layer}/attend", { ...one, body });
check(attended.data !== undefined, "masks and weights are taken");
const answer: Schemas["Answer"] = attended.data;
check((answer.output as number[][])[2]?.length === 16, "the output has the width of the layer");
check(answer.weights !== null && "rest" in answer.weights, "top_k has a rest");
check((answer.weights.values as number[][][])[0]?.length === 3, "a row of weights for each query row");

const tensor: Schemas["Tensor"] = { dtype: "float32", shape: [1, 2], data: "AACAPwAAAEA=" };
const attention = await client.POST("/v1/attention", {
  body: { query: tensor, key: tensor, value: tensor, weights: "mean", lse: true, scores: { stage: "masked" } },
});
const { output, lse } = attention.data ?? {};
check(output !== undefined && "dtype" in output && output.data === tensor.data, "one key: the output is its value");
check(lse !== undefined, "lse was asked for");

const narrow = await client.POST("/v1/layers/{layer}/attend", { ...one, body: { query: [[0.5]] } });
const problem: Schemas["Problem"] | undefined = narrow.error;
check(narrow.response.status === 422 && problem?.code === "bad_shape" && problem.param === "/query", "an error is a problem");
const unknown = await client.GET("/v1/layers/{layer}", { params: { path: { layer: "nobody" } } });
check(unknown.error?.code === "layer_not_found", "an unknown layer is a problem");

const input: Schemas["InferInput"] = { name: "query", datatype: "FP32", shape: [1, 3, 16], data: query.flat() };
const inferred = await client.POST("/v2/models/{layer}/infer", { ...one, body: { inputs: [input] } });
check(inferred.data?.outputs[0]?.name === "output", "the inference protocol answers");

// Never run: each of these mistakes is one that the compiler finds.
type Request = Schemas["AttendRequest"];
export const mistakes = (): unknown[] => [
  // @ts-expect-error: a field that no request has
  { query, attn_mask: [] } satisfies Request,
  // @ts-expect-error: a request without its query
  { masks } satisfies Request,
  // @ts-expect-error: a kind of mask that does not exist
  { query, masks: [{ kind: "padding", values: [true] }] } satisfies Request,
  // @ts-expect-error: a field of another kind of mask
  { query, masks: [{ kind: "causal", values: [true] }] } satisfies Request,
  // @ts-expect-error: a mask without its kind
  { query, masks: [{ values: [true] }] } satisfies Request,
  // @ts-expect-error: a form of weights that does not exist
  { query, weights: "max" } satisfies Request,
  // @ts-expect-error: a dtype that does not exist
  { dtype: "fp8", shape: [1], data: [1] } satisfies Schemas["Tensor"],
  // @ts-expect-error: a field that no answer has
  answer.outputs,
  // @ts-expect-error: a body without its key and value
  client.POST("/v1/attention", { body: { query } }),
  // @ts-expect-error: a path that does not exist
  client.GET("/v1/layer"),
];
console.log("ok");
