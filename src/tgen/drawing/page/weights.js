'use strict';
/* Attention weights of one head: { size, window, values }, the lower triangle row by row. */

const SCALE = 65535;  /* stands for a weight of 1 */

/* Decode a head's lower triangle, row by row: 16 bits per weight, little-endian. */
function unpack(base64) {
  const bytes = atob(base64);
  const values = new Uint16Array(bytes.length / 2);
  for (let i = 0; i < values.length; i++) {
    values[i] = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
  }
  return values;
}

const triangleIndex = (query, key) => (query * (query + 1)) / 2 + key;
const firstKey = ({ window }, query) => (window === null ? 0 : Math.max(query - window + 1, 0));
const isMasked = (matrix, query, key) => key > query || key < firstKey(matrix, query);
const weightOf = (matrix, query, key) =>
  key > query ? 0 : matrix.values[triangleIndex(query, key)] / SCALE;

/* Format a weight, or a sum of `terms` weights, with the digits that are exact despite rounding:
   4, or 5 for small weights. A weight rounded to 0 becomes "< bound". */
function weightText(weight, terms = 1) {
  const maxError = terms / 2 / SCALE;
  const digits = Math.floor(-Math.log10(maxError));
  const text = weight.toFixed(Math.max(0, Math.min(weight < 0.001 ? 5 : 4, digits)));
  return Number(text) > 0 ? text : `< ${(Math.ceil((weight + maxError) * 1e5) / 1e5).toFixed(5)}`;
}

/* Return the visible keys of a query ('from'), or queries of a key ('to'), largest weight first. */
function sortedWeights(matrix, token, direction) {
  const cells = [];
  for (let other = 0; other < matrix.size; other++) {
    const [query, key] = direction === 'from' ? [token, other] : [other, token];
    if (isMasked(matrix, query, key)) continue;
    cells.push({ query, key, token: other, weight: weightOf(matrix, query, key) });
  }
  return cells.sort((a, b) => b.weight - a.weight);
}

/* Return 256 colors for weights from 0 to 1; `shadeOf` returns a weight's index. */
const makeColors = (ramp) => Array.from({ length: 256 }, (_, shade) => {
  const position = (shade / 255) * (ramp.length - 1);
  const low = Math.min(Math.floor(position), ramp.length - 2);
  const next = ramp[low + 1];
  return ramp[low].map((part, i) => Math.round(part + (next[i] - part) * (position - low)));
});
const shadeOf = (weight) => Math.round(255 * Math.sqrt(weight));

/* Paint a matrix with one pixel per `factor` by `factor` weights: the maximum of the visible. */
function paint(canvas, matrix, colors, factor = 1) {
  const { size, values } = matrix;
  const side = Math.ceil(size / factor);
  const pooled = new Int32Array(side * side).fill(-1);
  for (let query = 0, i = 0; query < size; query++) {
    const row = Math.floor(query / factor) * side;
    for (let key = 0; key <= query; key++, i++) {
      const pixel = row + Math.floor(key / factor);
      if (values[i] > pooled[pixel] && !isMasked(matrix, query, key)) pooled[pixel] = values[i];
    }
  }
  canvas.width = canvas.height = side;
  const image = new ImageData(side, side);
  pooled.forEach((value, pixel) => {  /* masked cells stay transparent */
    if (value >= 0) image.data.set([...colors[shadeOf(value / SCALE)], 255], pixel * 4);
  });
  canvas.getContext('2d').putImageData(image, 0, 0);
}
