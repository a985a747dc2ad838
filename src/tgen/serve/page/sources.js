/* The passages of the training text that a phrase repeats. */

import { ask, newestOnly } from './api.js';

const load = newestOnly(async (signal, model, text) => {
  byId('sources-about').textContent = 'searching …';
  const { passages } = await ask('tgen/sources', { model, text }, signal);
  byId('sources-about').textContent = passages.length
    ? 'The longest passages first, with the places in the training text.'
    : 'The training text repeats no part of this phrase.';
  byId('passages').replaceChildren(...passages.map(({ text: passage, count, places }) => make('li', {},
    make('q', { className: 'token' }, passage), ` ${count} ${count === 1 ? 'time' : 'times'}`,
    make('ul', {}, ...places.map(({ file, line, before, after }) => make('li', {},
      make('b', {}, `${file}:${line}`), ' ', before, make('mark', {}, passage), after))))));
}, (error) => {
  byId('passages').replaceChildren();
  byId('sources-about').textContent = error.message;
});

export function clearSources() {
  load.stop();
  byId('phrase').value = '';
  byId('sources-about').textContent = '';
  byId('passages').replaceChildren();
}

export function addSources(modelName) {
  byId('sources-form').addEventListener('submit', (event) => {
    event.preventDefault();
    const text = byId('phrase').value;
    if (text.trim()) load(modelName(), text);
  });
}
