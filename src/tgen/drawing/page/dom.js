'use strict';
/* DOM helpers. Tokens are inserted as text, never as markup. */

const byId = (id) => document.getElementById(id);

/* Create an element with properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes('-') || name === 'role' || name === 'scope') node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/* Return a row of a list of bars; `share` from 0 to 1 is the length of its bar. */
function barRow(share, name, value, properties = {}) {
  const row = make('li', properties, make('span', { className: 'name' }, ...name),
    make('span', { className: 'value' }, value));
  row.style.setProperty('--share', Math.min(Math.max(share, 0), 1));
  return row;
}

const percent = (p) =>
  (p && p < 0.00005 ? '< 0.01%' : `${(100 * p).toFixed(p < 0.1 ? 2 : 1)}%`);

/* Scroll only `box`, until a rectangle in it is visible. */
function reveal(box, x, y, width, height) {
  const margin = 6;
  const clamp = (offset, low, high) => Math.max(Math.min(offset, low - margin), high + margin);
  box.scrollLeft = clamp(box.scrollLeft, x, x + width - box.clientWidth);
  box.scrollTop = clamp(box.scrollTop, y, y + height - box.clientHeight);
}

/* Return a token's label as nodes; the marks for leading whitespace are dimmed. */
function tokenText(label) {
  const [space] = /^[·⏎⇥]*/u.exec(label);
  const rest = label.slice(space.length);
  return space ? [make('span', { className: 'space' }, space), rest] : [rest];
}

/* Append the button of a token, and a line break after a token that ends a line. */
function addToken(box, label, index, className = 'chip') {
  const properties = { type: 'button', className, tabIndex: -1, 'data-token': index };
  const button = make('button', properties, ...tokenText(label));
  box.append(button);
  if (label.endsWith('⏎')) box.append(make('br'));
  return button;
}

/* Listen to the buttons of tokens, which may become more; `onHover` receives the token under the
   pointer or null, `onSelect` the token clicked or reached by keyboard. */
function listenToTokens(box, buttons, { onHover, onSelect }) {
  const tokenAt = (event) => {
    const button = event.target.closest('button');
    return button ? Number(button.dataset.token) : null;
  };
  box.addEventListener('pointerover', (event) => onHover(tokenAt(event)));
  box.addEventListener('pointerleave', () => onHover(null));
  box.addEventListener('click', (event) => tokenAt(event) !== null && onSelect(tokenAt(event)));
  box.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const ends = { Home: 0, End: buttons.length - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    const next = ends ?? Math.min(Math.max(tokenAt(event) + step, 0), buttons.length - 1);
    event.preventDefault();
    onSelect(next);
    buttons[next].focus();
  });
}

/* Add one button per token, with one Tab stop. */
function tokenButtons(box, labels, listeners) {
  const buttons = labels.map((label, i) => addToken(box, label, i));
  listenToTokens(box, buttons, listeners);
  return buttons;
}
