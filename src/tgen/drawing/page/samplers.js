/* The samplers' arithmetic, as in tgen/generation/truncation.py: functions of the next token's logits
   alone. The page of `tgen inspect --html` contains this file without its `export` words. */

export const DEFAULT_SAMPLERS = ['top_k', 'top_p', 'min_p', 'temperature'];
const LEVELS = 65534;  /* of a packed logit; 0 stands for a token that is impossible */

/* Decode all logits of a vocabulary: 16 bits each, little-endian, the square root of the distance
   from the highest. Impossible tokens are missing, and the most likely come first. */
export function unpackLogits({ highest, range, packed }) {
  const bytes = atob(packed);
  const candidates = [];
  for (let id = 0; id < bytes.length / 2; id++) {
    const level = bytes.charCodeAt(2 * id) | (bytes.charCodeAt(2 * id + 1) << 8);
    if (level) candidates.push({ id, logit: highest - range * (1 - (level - 1) / LEVELS) ** 2 });
  }
  return candidates.sort((a, b) => b.logit - a.logit || a.id - b.id);
}

/* Return the candidates and the rest of a record of logits: all of them, or the highest and a
   histogram. */
export function readLogits(record) {
  if ('packed' in record) return { candidates: unpackLogits(record), rest: null };
  const { ids, logits, edges, counts } = record;
  return { candidates: ids.map((id, i) => ({ id, logit: logits[i] })), rest: { edges, counts } };
}

/* Candidates and bins of the rest, the highest logit first. `weight` counts the tokens of an entry
   that are left; a bin has the logit of its middle. */
function makeEntries(candidates, rest, settings) {
  const { repetition_penalty: factor = 1 } = settings;
  const { presence_penalty: presence = 0, frequency_penalty: frequency = 0 } = settings;
  const entries = candidates.map((candidate, index) => {
    const { id, count = 0 } = candidate;
    let { logit } = candidate;
    if (count) {
      logit = (logit > 0 ? logit / factor : logit * factor) - presence - frequency * count;
    }
    return { id, index, logit, weight: 1 };
  });
  rest?.counts.forEach((count, i) => {
    const logit = (rest.edges[i] + rest.edges[i + 1]) / 2;
    if (count) entries.push({ id: Infinity, index: -1, logit, weight: count });
  });
  return entries.sort((a, b) => b.logit - a.logit || (a.id < b.id ? -1 : 1));
}

/* Return the share of each entry in the probability of those that are left. */
function shares(entries) {
  const highest = entries.find(({ weight }) => weight > 0).logit;
  const masses = entries.map(({ logit, weight }) => (weight ? weight * Math.exp(logit - highest) : 0));
  const total = masses.reduce((sum, mass) => sum + mass, 0);
  return masses.map((mass) => mass / total);
}

/* Each sampler takes entries and its value, and returns how many tokens of each entry it leaves. */
const SAMPLERS = {
  top_k(entries, k) {
    let before = 0;
    return entries.map(({ weight }) => {
      const left = Math.min(weight, Math.max(k - before, 0));
      before += weight;
      return left;
    });
  },
  top_p(entries, p) {
    let before = 0;
    const probabilities = shares(entries);
    return entries.map(({ weight }, i) => {
      if (!weight) return 0;
      const left = before === 0 ? 1 : 0;
      const room = Math.ceil((p - before) / (probabilities[i] / weight));
      before += probabilities[i];
      return Math.min(weight, Math.max(Number.isNaN(room) ? 0 : room, left));
    });
  },
  min_p(entries, p) {
    const lowest = entries.find(({ weight }) => weight > 0).logit + Math.log(p);
    return entries.map(({ logit, weight }) => (logit >= lowest ? weight : 0));
  },
  temperature(entries, temperature) {
    if (temperature > 0) return entries.map(({ weight }) => weight);
    const first = entries.findIndex(({ weight }) => weight > 0);
    return entries.map((_, i) => (i === first ? 1 : 0));
  },
};
const IS_OFF = { top_k: (k) => !k, top_p: (p) => p >= 1, min_p: (p) => !p, temperature: () => false };

/* Return the distribution of the next token before and after each sampler.

   candidates: [{id, logit, count}], `count` being the token's occurrences in the text, for
   penalties; other properties are passed on. rest: null, or {edges, counts}, the histogram of the
   logits of all other tokens, without those of the text. settings: temperature, top_k, top_p,
   min_p, repetition_penalty, presence_penalty, frequency_penalty, and `samplers`, their order.

   The result has `rows`, the candidates with `model` and final `probability` and `removedBy`, the
   sampler that removed them or ''; `steps`, what each sampler removed; and the final probability of
   the `rest`. */
export function distribution(candidates, rest, settings) {
  const rows = candidates.map((candidate) => ({ ...candidate, removedBy: '', probability: 0 }));
  const model = makeEntries(candidates, rest, {});
  shares(model).forEach((share, i) => {
    if (model[i].index >= 0) rows[model[i].index].model = share;
  });
  const entries = candidates.some(({ count }) => count)
    ? makeEntries(candidates, rest, settings) : model.map((entry) => ({ ...entry }));
  const names = [...(settings.samplers ?? DEFAULT_SAMPLERS)];
  if (settings.temperature === 0 && !names.includes('temperature')) names.push('temperature');
  const steps = [];
  for (const name of names.filter((one) => !IS_OFF[one]?.(settings[one]))) {
    const probabilities = shares(entries);
    const step = { sampler: name, candidates: 0, probability: 0, left: 0 };
    const left = SAMPLERS[name](entries, settings[name]);
    entries.forEach((entry, i) => {
      const removed = entry.weight - left[i];
      if (removed) {
        step.candidates += removed;
        step.probability += (probabilities[i] * removed) / entry.weight;
        if (entry.index >= 0) rows[entry.index].removedBy = name;
      }
      step.left += left[i];
      entry.weight = left[i];
    });
    if (name === 'temperature' && settings.temperature > 0) {
      const highest = entries.find(({ weight }) => weight > 0).logit;
      for (const entry of entries) entry.logit = (entry.logit - highest) / settings.temperature;
    }
    steps.push(step);
  }
  let restProbability = 0;
  shares(entries).forEach((share, i) => {
    if (entries[i].index >= 0) rows[entries[i].index].probability = share;
    else restProbability += share;
  });
  return { rows, steps, restProbability };
}
