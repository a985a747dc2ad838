/* The live page: writes with the model, and shows how each token was chosen. */

import { ask, firstText, fromBase64, newestOnly, stream, toBase64 } from './api.js';
import { Attend } from './attend.js';
import { Branches } from './branches.js';
import { Choose } from './choose.js';
import { commandOf } from './command.js';
import { Inside } from './inside.js';
import { addSources, clearSources } from './sources.js';
import { clearChart, measureCache } from './time.js';
import { TokenText, showAlternatives } from './text.js';

const PACE = 80;  /* milliseconds between new tokens in the text: drawing takes long, too */
const TOP = 10;  /* alternatives per token */
const VIEWS = ['choose', 'attend', 'inside', 'sources', 'time'];

let facts = null;  /* of the model */
let tokens = [];  /* of the shown branch, with those of its prompt */
let selected = -1;  /* index of a token */
let running = null;  /* an AbortController while a text is generated */

const text = new TokenText(byId('text'), { onHover: pointAt, onSelect: select });
const branches = new Branches(byId('branches'), showBranch);
const choose = new Choose();
const attend = new Attend({ onSelect: select });
const inside = new Inside();

const isChat = () => document.querySelector('[name=mode]:checked').value === 'chat';
const joined = (parts) => Uint8Array.from(parts.flatMap((part) => [...part]));
const setStatus = (message) => { byId('status').textContent = message; };
const setError = (error) => { byId('error').textContent = error ? error.message : ''; };

/* Decode the bytes of tokens; control tokens, which have none, show their names. */
function read(list) {
  return list.map((token) => ({
    ...token, bytes: fromBase64(token.bytes), label: facts.controls[token.id] ?? token.label,
    top: read(token.top ?? []),
  }));
}

/* The alternatives of the last token pointed at stay, so that the pointer can reach them. */
function pointAt(index) {
  if (index !== null) showAlternatives(tokens, index, (one) => branchAt(index, one));
}

function select(index) {
  selected = index;
  text.select(index);
  showAlternatives(tokens, index, (one) => branchAt(index, one));
  const phrase = new TextDecoder().decode(joined(tokens.slice(index, index + 12).map((t) => t.bytes)));
  byId('phrase').value = phrase.trim();
  showView();
}

/* Update the open view: the others compute nothing. */
function showView() {
  const view = VIEWS.find((name) => !byId(name).hidden);
  if (!facts || !tokens.length) return;
  if (running) {  /* writing needs the CPU */
    if (view === 'attend') attend.follow(tokens, selected);
    return;
  }
  if (view === 'choose') choose.show(branches.current, selected);
  if (view === 'attend') attend.show(tokens, selected);
  if (view === 'inside') inside.show(tokens, selected);
}

function openView(name) {
  for (const view of VIEWS) {
    byId(view).hidden = view !== name;
    const tab = byId(`tab-${view}`);
    tab.setAttribute('aria-selected', view === name);
    tab.tabIndex = view === name ? 0 : -1;
  }
  showView();
}

/* Start a branch: its prompt is bytes, or the messages of a chat, or `ids`, where the text before it
   has control tokens. */
async function write(branch, parent) {
  const isValid = ['max-tokens', 'seed'].every((name) => byId(name).reportValidity());
  if (!isValid) return;
  if (running) running.abort();
  const controller = running = new AbortController();
  byId('stop').disabled = false;
  setError(null);
  setStatus('reading the prompt …');
  try {
    const prompt = branch.ids ? { ids: branch.ids }
      : branch.messages ? { messages: branch.messages } : { bytes: toBase64(branch.prompt) };
    const scored = await ask(
      'tgen/tokens', { model: facts.name, top: TOP, ...prompt }, controller.signal);
    branch.tokens = read(scored.tokens);
    branch.nPrompt = branch.tokens.length;
    branch.answer ??= branch.nPrompt;
    branch.ends ??= scored.ends;
    branch.sampling = choose.sampling();
    branches.add(branch, parent);
    showBranch(branch);
    if (branch.messages) byId('prompt').value = '';
    if (document.activeElement === document.body) text.focus();  /* the button has gone */
    const body = {
      model: facts.name, prompt: branch.tokens.map(({ id }) => id), logprobs: TOP,
      max_tokens: Number(byId('max-tokens').value), ...branch.sampling,
    };
    if (branch.messages) body.stop_token_ids = branch.ends;
    if (byId('seed').value !== '') body.seed = Number(byId('seed').value);
    await receive(branch, body, controller.signal);
  } catch (error) {
    if (running !== controller) return;  /* another text, or none, is shown now */
    if (error.name !== 'AbortError') setError(error);
    setStatus(error.name === 'AbortError' ? 'stopped' : '');
  } finally {
    if (running === controller) {
      running = null;
      showNewTokens(branch);
      byId('stop').disabled = true;
      branches.draw();
      showMessages();
      showView();
    }
  }
}

/* Return the messages of a branch; an answer that has no text yet is missing. */
function conversation({ messages, tokens: all, answer }) {
  const content = new TextDecoder().decode(joined(all.slice(answer).map(({ bytes }) => bytes)));
  return content ? [...messages, { role: 'assistant', content }] : messages;
}

function showMessages() {
  const shown = branches.current?.messages ? conversation(branches.current) : [];
  byId('messages').replaceChildren(...shown.map(({ role, content }) => make('li', { className: role },
    make('b', {}, role === 'user' ? 'You' : 'Model'), ' ', content)));
}

async function receive(branch, body, signal) {
  const began = performance.now();
  let shown = began;
  for await (const event of stream('tgen/generate', body, signal)) {
    if ('seed' in event) branch.seed = event.seed;
    if (!event.tokens) continue;
    const added = read(event.tokens);
    branch.tokens.push(...added);
    const now = performance.now();
    if (now - shown < PACE && !added.at(-1).finish) continue;
    shown = now;
    showNewTokens(branch);
    const n = branch.tokens.length - branch.nPrompt;
    const seconds = (performance.now() - began) / 1000;
    const { finish } = added.at(-1);
    const isFull = branch.tokens.length >= facts.context;
    const why = { stop: ' · the text ended', length: isFull ? ' · the context is full' : '' }[finish];
    setStatus(`${n} token${n === 1 ? '' : 's'} · ${(n / seconds).toFixed(0)} tokens/s${why ?? ' …'}`);
  }
}

function showNewTokens(branch) {
  if (branches.current !== branch) return;
  text.add(tokens.slice(text.chips.length), { isPrompt: false });
  select(tokens.length - 1);
  showCommand();
}

function showBranch(branch) {
  branches.select(branch);
  ({ tokens } = branch);
  text.clear();
  text.add(tokens.slice(0, branch.nPrompt), { isPrompt: true });
  text.add(tokens.slice(branch.nPrompt), { isPrompt: false });
  showCommand();
  showMessages();
  select(tokens.length - 1);
}

function showCommand() {
  const branch = branches.current;
  const repeatable = branch && branch.seed !== undefined && branch.tokens.length > branch.nPrompt &&
    !branch.ids && (!branch.messages || branch.messages.length === 1);
  byId('command').textContent = repeatable ? commandOf(branch, facts) : '';
  byId('copy').hidden = !repeatable;
}

/* Continue from an alternative of a token: the text before it and the alternative are the prompt. */
function branchAt(index, one) {
  const parent = branches.current;
  const name = `‘${one.label}’ at ${index}`;
  const { messages, answer, ends } = parent;
  const before = [...tokens.slice(0, index), one];
  if (messages && index >= answer) {
    write({ name, ids: before.map(({ id }) => id), messages, answer, ends }, parent);
  } else {
    write({ name, ...asPrompt(before) }, parent);
  }
}

/* Return tokens as a prompt of bytes, or of ids if some have no bytes. */
function asPrompt(list) {
  if (list.some(({ bytes }) => !bytes.length)) return { ids: list.map(({ id }) => id) };
  return { prompt: joined(list.map(({ bytes }) => bytes)) };
}

/* Return the start of a text as the name of its branch. */
const nameOf = (typed) => (typed.trim() ? [...typed].slice(0, 40).join('') : 'blank text');

/* Return whether the model has ended a text, which nothing can follow. */
const hasEnded = ({ tokens: all, ends }) => all.length > 0 && ends.includes(all.at(-1).id);

function onContinue() {
  const typed = byId('prompt').value;
  const parent = branches.current;
  if (isChat()) {
    if (!typed.trim()) return;
    const before = parent?.messages ? conversation(parent) : [];
    const isAnswered = before.at(-1)?.role !== 'user';
    const messages = [...(isAnswered ? before : before.slice(0, -1)), { role: 'user', content: typed }];
    const prompt = new TextEncoder().encode(typed);
    write({ name: nameOf(typed), prompt, messages }, parent);
  } else if (parent && parent.typed === typed && !parent.messages && !hasEnded(parent)) {
    write({ name: 'continued', ...asPrompt(parent.tokens), typed }, parent);
  } else {
    const prompt = new TextEncoder().encode(typed || byId('prompt').placeholder);
    write({ name: nameOf(typed || 'What is'), prompt, typed }, null);
  }
}

function clear() {
  running?.abort();
  running = null;
  byId('stop').disabled = true;
  tokens = [];
  selected = -1;
  text.clear();
  branches.clear();
  for (const view of [choose, attend, inside]) view.clear();
  clearSources();
  measure.stop();
  clearChart();
  showMessages();
  byId('command').textContent = '';
  byId('copy').hidden = true;
  byId('alternatives-box').hidden = true;
  setStatus('');
  setError(null);
}

const openModel = newestOnly(async (signal, name) => {
  const opened = await ask('tgen/model', { model: name }, signal);
  clear();
  facts = opened;
  byId('model-name').textContent = facts.name;
  const { family, layers, heads, vocabulary, context, dtype } = facts;
  byId('facts').replaceChildren(...[
    family, `layers × heads: ${layers} × ${heads}`, `${vocabulary.toLocaleString('en')} tokens`,
    `context ${context.toLocaleString('en')}`, dtype].map((fact) => make('li', {}, fact)));
  byId('mode').hidden = !facts.chat;
  document.querySelector(`[name=mode][value=${facts.chat ? 'chat' : 'text'}]`).checked = true;
  onMode();
  choose.setModel(facts);
  attend.setModel(facts);
  inside.setModel(facts);
}, setError);

const measure = newestOnly(async (signal) => {
  const ids = tokens.length ? tokens.map(({ id }) => id) : [0];
  await measureCache(facts, ids, signal);
}, (error) => { byId('time-about').textContent = error.message; });

function onMode() {
  byId('messages').hidden = !isChat();
  byId('prompt').placeholder = isChat() ? 'Ask something' : 'What is';
}

async function start() {
  const { data } = await ask('v1/models');
  byId('model').replaceChildren(...data.map(({ id }) => make('option', { value: id }, id)));
  byId('model-choice').hidden = data.length < 2;
  await openModel(data[0].id);
  byId('main').hidden = false;
  openView('choose');
  if (firstText) {
    byId('prompt').value = firstText;
    if (!isChat()) onContinue();
  }
}

byId('model').addEventListener('change', ({ target }) => openModel(target.value));
byId('continue').addEventListener('click', onContinue);
byId('stop').addEventListener('click', () => running?.abort());
byId('new').addEventListener('click', clear);
byId('prompt').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  if (!event.ctrlKey && !isChat()) return;
  event.preventDefault();
  onContinue();
});
for (const input of document.getElementsByName('mode')) {
  input.addEventListener('change', () => { clear(); onMode(); });
}
byId('copy').addEventListener('click', () => {
  getSelection().selectAllChildren(byId('command'));
  /* Browsers have a clipboard for pages of this machine or over HTTPS. */
  navigator.clipboard?.writeText(byId('command').textContent);
});
byId('tabs').addEventListener('click', ({ target }) => {
  if (target.role === 'tab') openView(target.id.slice('tab-'.length));
});
byId('tabs').addEventListener('keydown', (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const now = VIEWS.findIndex((name) => !byId(name).hidden);
  const next = VIEWS[(now + step + VIEWS.length) % VIEWS.length];
  openView(next);
  byId(`tab-${next}`).focus();
});
byId('measure').addEventListener('click', () => measure());
addSources(() => facts.name);
start().catch(setError);
