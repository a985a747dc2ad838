/* A chart of milliseconds per token with and without the KV cache, drawn while it is measured. */

import { ask } from './api.js';

const FIRST = 16;
const LAST = 1024;
const HEIGHT = 260;
const MARGIN = { left: 58, right: 96, top: 12, bottom: 34 };

const milliseconds = (ms) => (ms >= 10 ? ms.toFixed(0) : ms.toPrecision(2));

function draw(points) {
  const canvas = byId('chart');
  const ratio = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth - 40;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${HEIGHT}px`;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  const color = (name) => getComputedStyle(canvas).getPropertyValue(name);
  const right = width - MARGIN.right;
  const bottom = HEIGHT - MARGIN.bottom;
  const longest = Math.max(...points.map(({ length }) => length), FIRST);
  const slowest = Math.max(...points.map(({ without }) => without), 1e-3);
  const x = (length) => MARGIN.left + (length / longest) * (right - MARGIN.left);
  const y = (ms) => bottom - (ms / slowest) * (bottom - MARGIN.top);
  context.font = '12px system-ui, sans-serif';
  context.strokeStyle = color('--line');
  context.fillStyle = color('--soft');
  context.strokeRect(MARGIN.left, MARGIN.top, right - MARGIN.left, bottom - MARGIN.top);
  context.textAlign = 'right';
  for (const part of [0, 0.5, 1]) {
    context.fillText(`${milliseconds(part * slowest)} ms`, MARGIN.left - 6, y(part * slowest) + 4);
  }
  context.textAlign = 'center';
  for (const part of [0, 0.5, 1]) {
    context.fillText(Math.round(part * longest), x(part * longest), bottom + 16);
  }
  context.fillText('tokens', (MARGIN.left + right) / 2, bottom + 31);
  context.textAlign = 'left';
  for (const [name, ink] of [['without', '--bad'], ['with', '--good']]) {
    context.strokeStyle = context.fillStyle = color(ink);
    context.lineWidth = 2;
    context.beginPath();
    for (const point of points) context.lineTo(x(point.length), y(point[name]));
    context.stroke();
    for (const point of points) context.fillRect(x(point.length) - 2, y(point[name]) - 2, 4, 4);
    const last = points.at(-1);
    if (last) context.fillText(`${name} cache`, x(last.length) + 8, y(last[name]) + 4);
  }
}

export function clearChart() {
  byId('time-about').textContent = '';
  byId('chart').width = 0;
  delete byId('chart').dataset.points;
}

/* Measure at lengths that double, up to the context; the text's tokens are repeated. */
export async function measureCache({ name: model, context }, ids, signal) {
  const points = [];
  byId('time-about').textContent = 'measuring …';
  for (let length = FIRST; length <= Math.min(LAST, context); length *= 2) {
    const { with_cache: cached, without_cache: without } =
      await ask('tgen/cache', { model, ids, length }, signal);
    points.push({ length, with: cached, without });
    draw(points);
    byId('time-about').textContent =
      `${length} tokens: ${milliseconds(cached)} ms with, ${milliseconds(without)} ms without ` +
      `the cache (${(without / cached).toPrecision(3)} times)`;
  }
  byId('chart').dataset.points = JSON.stringify(points);
}
