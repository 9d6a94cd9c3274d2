// One large matrix on a canvas: both axes named, crosshair, row lock, colour bar, hatched where a mask forbids; and its table.

import { make } from "./dom.js";
import { colour, figure, imageOf, inkOn, position, valueAt } from "./scale.js";

/** @typedef {import("./picture.js").Drawn} Drawn */
/** @typedef {import("./picture.js").Cursor} Cursor */
/** Where things stand on the canvas, in CSS pixels.
 * @typedef {{ left: number, top: number, cell: number, width: number, height: number }} Frame */

const FONT = "system-ui, sans-serif";
const MOST_CELLS = 4096;

export class Matrix {
  /** @param {HTMLElement} container
   * @param {{ point: (cursor: Cursor | null) => void, lock: (cursor: { row: number, column: number }) => void }} on */
  constructor(container, on) {
    this.on = on;
    this.canvas = make("canvas");
    this.overlay = make("canvas", { class: "overlay", tabindex: 0, role: "application", "aria-describedby": "figure" });
    this.box = make("div", { class: "matrix-box" }, this.canvas, this.overlay);
    this.scroll = make("div", { class: "scroll" }, this.box);
    container.replaceChildren(this.scroll);
    /** @type {Drawn | null} */ this.drawn = null;
    /** @type {Frame} */ this.frame = { left: 0, top: 0, cell: 1, width: 0, height: 0 };
    /** @type {Cursor} */ this.cursor = { row: null, column: null };
    /** @type {number | null} */ this.locked = null;
    this.listen();
  }

  listen() {
    const { overlay } = this;
    overlay.addEventListener("pointermove", (event) => this.on.point(this.cellAt(event)));
    overlay.addEventListener("pointerleave", () => this.on.point(null));
    overlay.addEventListener("click", (event) => {
      const cell = this.cellAt(event);
      if (cell) this.on.lock(cell);
    });
    overlay.addEventListener("keydown", (event) => this.key(event));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const drawn = this.drawn;
    if (!drawn || event.ctrlKey || event.metaKey || event.altKey) return;
    const [L, S] = [drawn.rows.length, drawn.columns.length];
    const { row, column } = { row: this.cursor.row ?? 0, column: this.cursor.column ?? 0 };
    const isFirst = this.cursor.row === null || this.cursor.column === null;
    /** @type {Record<string, [number, number]>} */
    const moves = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      Home: [row, 0], End: [row, S - 1], PageUp: [row - 10, column], PageDown: [row + 10, column],
    };
    if (event.key === "Enter" || event.key === " ") this.on.lock({ row, column });
    else if (moves[event.key]) {
      const [to, at] = isFirst ? [row, column] : moves[event.key];
      const cell = { row: Math.min(Math.max(to, 0), L - 1), column: Math.min(Math.max(at, 0), S - 1) };
      if (this.locked !== null && cell.row !== this.locked) this.on.lock(cell);
      else this.on.point(cell);
      this.reveal();
    } else return;
    event.preventDefault();
  }

  /** Scrolls the pointed cell into view. */
  reveal() {
    const { frame, scroll, cursor } = this;
    const x = frame.left + (cursor.column ?? 0) * frame.cell;
    if (x < scroll.scrollLeft + frame.left || x + frame.cell > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = x - scroll.clientWidth / 2;
  }

  /** @param {MouseEvent} event @returns {{ row: number, column: number } | null} */
  cellAt(event) {
    const { left, top, cell } = this.frame;
    const [row, column] = [Math.floor((event.offsetY - top) / cell), Math.floor((event.offsetX - left) / cell)];
    const { drawn } = this;
    return drawn && row >= 0 && column >= 0 && row < drawn.rows.length && column < drawn.columns.length ? { row, column } : null;
  }

  /** @param {Drawn} drawn */
  draw(drawn) {
    this.drawn = drawn;
    const [L, S] = [drawn.rows.length, drawn.columns.length];
    this.overlay.setAttribute("aria-label", `${drawn.title}: ${L} queries as rows, ${S} keys as columns. Arrow keys move, Enter locks a row, Escape unlocks.`);
    const pen = this.size(drawn);
    pen.fillStyle = ink(this.canvas, "--paper");
    pen.fillRect(0, 0, this.frame.width, this.frame.height);
    this.drawCells(pen, drawn);
    this.drawNames(pen, drawn);
    drawBar(pen, drawn.scale, this.frame, ink(this.canvas, "--ink-2"));
  }

  /** Fits the canvases to the room there is. @param {Drawn} drawn */
  size({ rows, columns }) {
    const room = this.scroll.clientWidth;
    const pen = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    pen.font = `13px ${FONT}`;
    const widest = (/** @type {string[]} */ names, /** @type {number} */ most) => Math.min(Math.max(...names.slice(0, 600).map((name) => pen.measureText(name).width), 16), most);
    const left = Math.ceil(widest(rows, room < 500 ? 64 : 120)) + 30;
    const slant = widest(columns, 100) * 0.71;
    const cell = Math.min(Math.max((room - left - slant * 0.6 - 8) / columns.length, 1.5), 54);
    const whole = cell > 4 ? Math.floor(cell) : Math.floor(cell * 2) / 2;
    const top = Math.ceil(slant) + 34;
    const width = Math.max(left + whole * columns.length + slant * 0.8 + 8, Math.min(room, 300));
    this.frame = { left, top, cell: whole, width: Math.ceil(width), height: top + whole * rows.length + 52 };
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.width = this.frame.width * devicePixelRatio;
      canvas.height = this.frame.height * devicePixelRatio;
      canvas.style.width = `${this.frame.width}px`;
      canvas.style.height = `${this.frame.height}px`;
    }
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    return pen;
  }

  /** @param {CanvasRenderingContext2D} pen @param {Drawn} drawn */
  drawCells(pen, { rows, columns, values, masked, scale }) {
    const { left, top, cell } = this.frame;
    const [L, S] = [rows.length, columns.length];
    if (masked) pen.drawImage(hatching(masked, S, cell, ink(this.canvas, "--ink-3")), left, top, S * cell, L * cell);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(asCanvas(imageOf(values, S, masked, scale)), left, top, S * cell, L * cell);
    if (cell >= 12) drawLines(pen, this.frame, L, S, ink(this.canvas, "--paper"));
    pen.strokeStyle = ink(this.canvas, "--line");
    pen.lineWidth = 1;
    pen.strokeRect(left - 0.5, top - 0.5, S * cell + 1, L * cell + 1);
    if (cell < 34) return;
    pen.font = `11px ${FONT}`;
    pen.textAlign = "center";
    values.forEach((value, at) => {
      if (masked?.[at] || Math.abs(value) < scale.max * 0.045) return;
      pen.fillStyle = inkOn(scale, value);
      pen.fillText(value.toFixed(2).replace("-", "−").replace("0.", "."), left + ((at % S) + 0.5) * cell, top + (Math.floor(at / S) + 0.5) * cell + 4);
    });
  }

  /** @param {CanvasRenderingContext2D} pen @param {Drawn} drawn */
  drawNames(pen, { rows, columns }) {
    const { left, top, cell } = this.frame;
    if (cell >= 9) {
      pen.fillStyle = ink(this.canvas, "--ink");
      rows.forEach((name, at) => nameRow(pen, this.frame, name, at));
      columns.forEach((name, at) => nameColumn(pen, this.frame, name, at));
    }
    pen.fillStyle = ink(this.canvas, "--ink-2");
    pen.font = `italic 13px ${FONT}`;
    pen.textAlign = "left";
    pen.fillText("key: what is looked at →", left, 14);
    pen.save();
    pen.translate(12, top + rows.length * cell);
    pen.rotate(-Math.PI / 2);
    pen.fillText("← query: what looks", 0, 0, top + rows.length * cell - 2);
    pen.restore();
  }

  /** Draws the crosshair. @param {Cursor} cursor @param {number | null} locked */
  point(cursor, locked) {
    this.cursor = cursor;
    this.locked = locked;
    const pen = /** @type {CanvasRenderingContext2D} */ (this.overlay.getContext("2d"));
    const { left, top, cell, width, height } = this.frame;
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, width, height);
    if (!this.drawn) return;
    const { rows, columns } = this.drawn;
    pen.strokeStyle = ink(this.canvas, "--mark");
    if (cursor.row !== null) {
      pen.lineWidth = cursor.row === locked ? 2.5 : 1;
      pen.strokeRect(left - 1, top + cursor.row * cell - 0.5, columns.length * cell + 2, Math.max(cell, 2) + 1);
    }
    pen.lineWidth = 1;
    if (cursor.column !== null) pen.strokeRect(left + cursor.column * cell - 0.5, top - 1, Math.max(cell, 2) + 1, rows.length * cell + 2);
    if (cursor.row !== null && cursor.column !== null) {
      pen.lineWidth = 2.5;
      pen.strokeRect(left + cursor.column * cell - 0.5, top + cursor.row * cell - 0.5, cell + 1, cell + 1);
    }
    this.markNames(pen, cursor);
  }

  /** @param {CanvasRenderingContext2D} pen @param {Cursor} cursor */
  markNames(pen, { row, column }) {
    const { frame, drawn } = this;
    if (!drawn) return;
    const [paper, mark] = [ink(this.canvas, "--paper"), ink(this.canvas, "--mark")];
    if (row !== null) {
      pen.fillStyle = paper;
      pen.fillRect(18, frame.top + (row + 0.5) * frame.cell - 9, frame.left - 21, 18);
      pen.fillStyle = mark;
      nameRow(pen, frame, drawn.rows[row], row, "bold ");
    }
    if (column !== null) {
      pen.strokeStyle = paper;
      pen.lineWidth = 5;
      pen.fillStyle = mark;
      nameColumn(pen, frame, drawn.columns[column], column, "bold ");
    }
  }

  /** Fills the table: all cells where they are few, else the row that is pointed at.
   * @param {HTMLElement} container @param {number | null} row @param {(row: number) => string} entropy */
  table(container, row, entropy) {
    const drawn = this.drawn;
    if (!drawn) return;
    const S = drawn.columns.length;
    const isWhole = drawn.values.length <= MOST_CELLS;
    const shown = isWhole ? drawn.rows.map((_, at) => at) : [row ?? 0];
    const say = (/** @type {number} */ at) => (drawn.masked?.[at] ? "masked" : figure(drawn.values[at]));
    const head = make("tr", {}, make("th", { scope: "col" }, "query \\ key"), ...drawn.columns.map((name) => make("th", { scope: "col" }, name)), make("th", { scope: "col" }, "entropy, nats"));
    const body = shown.map((at) => make("tr", {}, make("th", { scope: "row" }, drawn.rows[at]),
      ...drawn.columns.map((_, key) => make("td", {}, say(at * S + key))), make("td", {}, entropy(at))));
    const caption = `${drawn.title}${isWhole ? "" : `: the row of “${drawn.rows[shown[0]]}”; point at another one for its figures, or take the CSV`}`;
    container.replaceChildren(make("table", { class: "figures" }, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body)));
  }
}

/** A colour of the style sheet. @param {Element} element @param {string} name */
const ink = (element, name) => getComputedStyle(element).getPropertyValue(name).trim();

/** @param {CanvasRenderingContext2D} pen @param {Frame} frame @param {string} name @param {number} at */
function nameRow(pen, { left, top, cell }, name, at, weight = "") {
  pen.font = `${weight}${Math.min(13, Math.max(cell, 10))}px ${FONT}`;
  pen.textAlign = "right";
  pen.fillText(name, left - 7, top + (at + 0.5) * cell + 4, left - 26);
}

/** @param {CanvasRenderingContext2D} pen @param {Frame} frame @param {string} name @param {number} at */
function nameColumn(pen, { left, top, cell }, name, at, weight = "") {
  pen.save();
  pen.font = `${weight}${Math.min(13, Math.max(cell, 10))}px ${FONT}`;
  pen.textAlign = "left";
  pen.translate(left + (at + 0.5) * cell + 3, top - 6);
  pen.rotate(-Math.PI / 4);
  if (weight) pen.strokeText(name, 0, 0, 100);
  pen.fillText(name, 0, 0, 100);
  pen.restore();
}

/** @param {CanvasRenderingContext2D} pen @param {Frame} frame @param {number} L @param {number} S @param {string} style */
function drawLines(pen, { left, top, cell }, L, S, style) {
  pen.fillStyle = style;
  for (let row = 1; row < L; row++) pen.fillRect(left, top + row * cell - 0.5, S * cell, 1);
  for (let column = 1; column < S; column++) pen.fillRect(left + column * cell - 0.5, top, 1, L * cell);
}

/** The colour bar below the cells. @param {CanvasRenderingContext2D} pen @param {import("./scale.js").Scale} scale @param {Frame} frame @param {string} style */
function drawBar(pen, scale, frame, style) {
  const [y, width] = [frame.height - 36, Math.min(frame.width - frame.left - 16, 280)];
  for (let x = 0; x < width; x++) {
    pen.fillStyle = colour(scale, valueAt(scale, x / (width - 1)));
    pen.fillRect(frame.left + x, y, 1.5, 10);
  }
  const ticks = scale.kind === "diverging" ? [-1, -0.5, 0, 0.5, 1] : [0, 0.05, 0.25, 0.5, 1];
  pen.fillStyle = style;
  pen.font = `11px ${FONT}`;
  for (const tick of ticks) {
    const x = frame.left + position(scale, tick * scale.max) * width;
    pen.textAlign = tick === ticks[0] ? "left" : tick === 1 ? "right" : "center";
    pen.fillRect(Math.min(x, frame.left + width - 1), y + 10, 1, 4);
    pen.fillText(String(Number((tick * scale.max).toPrecision(2))).replace("-", "−"), x, y + 26);
  }
}

/** @param {ImageData} image */
function asCanvas(image) {
  const canvas = new OffscreenCanvas(image.width, image.height);
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

/** The masked cells as an image of diagonal lines. @param {Uint8Array} masked @param {number} S @param {number} cell @param {string} style */
function hatching(masked, S, cell, style) {
  const image = new ImageData(S, masked.length / S);
  new Uint32Array(image.data.buffer).forEach((_, at, pixels) => (pixels[at] = masked[at] ? 0xff000000 : 0));
  const sharp = Math.max(devicePixelRatio, 1);
  const canvas = new OffscreenCanvas(image.width * cell * sharp, image.height * cell * sharp);
  const pen = /** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext("2d"));
  pen.imageSmoothingEnabled = false;
  pen.drawImage(asCanvas(image), 0, 0, canvas.width, canvas.height);
  pen.globalCompositeOperation = "source-in";
  pen.strokeStyle = style;
  pen.lineWidth = sharp;
  pen.beginPath();
  const gap = 6 * sharp;
  for (let x = -canvas.height; x < canvas.width; x += gap) {
    pen.moveTo(x, canvas.height);
    pen.lineTo(x + canvas.height, 0);
  }
  pen.stroke();
  return canvas;
}
