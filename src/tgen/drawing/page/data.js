'use strict';
/* The page's data. */

const data = JSON.parse(byId('data').textContent);
const size = data.tokens.length;
const labels = data.tokens.map(({ label }) => label);
const colors = makeColors(data.ramp);

const matrices = data.matrices.map((matrix) => (
  { ...matrix, size, values: unpack(byId(matrix.id).textContent.trim()) }));
const indexOf = (layer, head) =>
  matrices.findIndex((matrix) => matrix.layer === layer && matrix.head === head);
const reportOf = ({ layer, head }) =>
  data.heads?.heads.find((report) => report.layer === layer && report.head === head);
