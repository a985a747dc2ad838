/* Requests to the server. The key stays in memory: it comes from the address's fragment, which is
   cleared at once, or from the form. */

const fragment = new URLSearchParams(location.hash.slice(1));
if (location.hash) history.replaceState(null, '', location.pathname);
let key = fragment.get('key') ?? '';
export const firstText = fragment.get('text');

let typedKey = null;  /* the promise of a key, shared by requests that wait for one */

/* Show the form until a key is typed. */
function askForKey() {
  const form = byId('key-form');
  if (key) byId('key-about').textContent = 'The server did not accept the key.';
  form.hidden = false;
  byId('key').focus();
  typedKey ??= new Promise((resolve) => {
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      key = byId('key').value.trim();
      byId('key').value = '';
      form.hidden = true;
      typedKey = null;
      resolve();
    }, { once: true });
  });
  return typedKey;
}

async function send(path, body, signal) {
  const utf8 = String.fromCharCode(...new TextEncoder().encode(key));  /* headers are bytes */
  const headers = key ? { Authorization: `Bearer ${utf8}` } : {};
  if (body) headers['Content-Type'] = 'application/json';
  const method = body ? 'POST' : 'GET';
  const options = { method, headers, signal, body: body && JSON.stringify(body) };
  const response = await fetch(path, options).catch((error) => {
    throw error.name === 'AbortError' ? error : new Error('the server does not answer');
  });
  if (response.status === 401) {
    await askForKey();
    return send(path, body, signal);
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `the server answered with ${response.status}`);
  }
  return response;
}

/* Return the JSON of an answer; throws an Error with the server's message. */
export const ask = async (path, body, signal) => (await send(path, body, signal)).json();

/* Yield the events of a stream; throws as `ask` does. */
export async function* stream(path, body, signal) {
  const response = await send(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error('the connection was lost');
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (line === 'data: [DONE]') return;
      if (!line.startsWith('data: ')) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/* Return a function that runs `work(signal, ...values)`; the next call aborts it, or its `stop`. */
export function newestOnly(work, onError) {
  let controller = new AbortController();
  const start = async (...values) => {
    controller.abort();
    controller = new AbortController();
    const { signal } = controller;
    try {
      await work(signal, ...values);
    } catch (error) {
      if (!signal.aborted) onError(error);
    }
  };
  start.stop = () => controller.abort();
  return start;
}

export const toBase64 = (bytes) => {
  let text = '';
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
};
export const fromBase64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
