// Six sentences, each with a cell that shows something true of MiniLM; `weight` is that cell's attention weight, to 0.001.

/** @typedef {{ title: string, text: string, pair: string, layer: number, head: number, row: number, column: number, weight: number }} Example */

const STREET = "the animal did not cross the street because it was too";
const BUCKET = "he kicked the bucket and spilled the beans";
const COFFEE = "she drank a cup of coffee and he drank a glass of water";
const PARK = "the children played football in the park";

/** @type {readonly Example[]} */
export const EXAMPLES = [
  { title: "The animal and the street: who was too tired? (it → animal)",
    text: `${STREET} tired`, pair: "", layer: 3, head: 1, row: 9, column: 2, weight: 0.653 },
  { title: "One word later: too wide (animal falls to 0.30, street rises to 0.16)",
    text: `${STREET} wide`, pair: "", layer: 3, head: 1, row: 9, column: 7, weight: 0.155 },
  { title: "A head that reads the token before (bucket → the)",
    text: BUCKET, pair: "", layer: 0, head: 2, row: 4, column: 3, weight: 0.999 },
  { title: "A head at rest: nearly all of it on [CLS] (coffee → [CLS])",
    text: COFFEE, pair: "", layer: 4, head: 5, row: 6, column: 0, weight: 0.852 },
  { title: "A pair: the same thing in other words (children → kids)",
    text: PARK, pair: "kids enjoyed a soccer match outside", layer: 2, head: 9, row: 2, column: 9, weight: 0.761 },
  { title: "Two idioms: an article finds its verb (the → kicked)",
    text: BUCKET, pair: "", layer: 2, head: 11, row: 3, column: 2, weight: 0.814 },
];
