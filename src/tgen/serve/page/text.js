/* The tokens of the text, colored by probability, and the alternatives of one of them. */

const FULL_COLOR_BITS = 10;  /* surprisal in bits of the strongest color */

export class TokenText {
  constructor(box, listeners) {
    this.box = box;
    this.chips = [];
    this.selected = -1;
    listenToTokens(box, this.chips, listeners);
  }

  clear() {
    this.box.replaceChildren();
    this.chips.length = 0;
    this.selected = -1;
  }

  /* Append tokens of the prompt or of the model. */
  add(tokens, { isPrompt }) {
    for (const { label, logprob } of tokens) {
      const className = isPrompt ? 'chip prompt' : 'chip';
      const chip = addToken(this.box, label, this.chips.length, className);
      const bits = logprob === null ? 0 : -logprob / Math.LN2;
      chip.style.setProperty('--share', Math.min(bits / FULL_COLOR_BITS, 1));
      this.chips.push(chip);
    }
  }

  select(index) {
    const before = this.chips[this.selected];
    if (before) {
      before.classList.remove('selected');
      before.setAttribute('aria-pressed', false);
      before.tabIndex = -1;
    }
    this.selected = index;
    const chip = this.chips[index];
    if (!chip) return;
    chip.classList.add('selected');
    chip.setAttribute('aria-pressed', true);
    chip.tabIndex = 0;
    reveal(this.box, chip.offsetLeft, chip.offsetTop, chip.offsetWidth, chip.offsetHeight);
  }

  focus() {
    this.chips[this.selected]?.focus();
  }
}

/* List the alternatives of a token; `onChoose` receives the one that is clicked. */
export function showAlternatives(tokens, index, onChoose) {
  const token = tokens[index];
  byId('alternatives-box').hidden = !token;
  if (!token) return;
  byId('title-alternatives').replaceChildren(
    'Token ', make('b', { className: 'token' }, token.label), ` (${index})`,
    token.logprob === null ? ': the first token, not predicted'
      : `: probability ${percent(Math.exp(token.logprob))}`);
  const isListed = token.logprob === null || token.top.some(({ id }) => id === token.id);
  const rows = (isListed ? token.top : [...token.top, token]).map((one) => {
    const p = Math.exp(one.logprob);
    const isOwn = one.id === token.id;
    const button = make('button', {
      type: 'button', disabled: isOwn, 'data-id': one.id,
      'aria-label': isOwn ? `${one.label}, in the text` : `Branch with ${one.label}`,
    }, ...tokenText(one.label));
    button.addEventListener('click', () => onChoose(one));
    return barRow(p, [button], percent(p), { className: isOwn ? 'own' : '' });
  });
  byId('alternatives').replaceChildren(...rows);
}
