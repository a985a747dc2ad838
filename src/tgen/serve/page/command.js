/* The shell command that repeats a branch. */

const SAFE = /^[\x20-\x7e\n]*$/u;

/* Return bytes as one word of bash. */
function quote(bytes) {
  const text = new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes);
  if (SAFE.test(text)) return `'${text.replaceAll("'", "'\\''")}'`;
  const escaped = Array.from(bytes, (byte) => {
    const character = String.fromCharCode(byte);
    if (character === "'" || character === '\\') return `\\${character}`;
    if (byte >= 0x20 && byte < 0x7f) return character;
    return `\\x${byte.toString(16).padStart(2, '0')}`;
  });
  return `$'${escaped.join('')}'`;
}

/* Return the command that repeats a branch; flags that the model sets itself are left out. An
   argument cannot have a zero byte, and the prompt - means stdin. */
export function commandOf(branch, facts) {
  const { prompt } = branch;
  const isPiped = prompt.includes(0) || (prompt.length === 1 && prompt[0] === 0x2d);
  const octal = Array.from(prompt, (byte) => `\\${byte.toString(8).padStart(3, '0')}`).join('');
  const words = isPiped ? [`printf '${octal}' |`] : [];
  words.push('tgen generate', `--model ${quote(new TextEncoder().encode(facts.name))}`);
  if (branch.messages) words.push('--chat');
  words.push(`--prompt ${isPiped ? '-' : quote(prompt)}`, `--seed ${branch.seed}`);
  words.push(`-n ${branch.tokens.length - branch.nPrompt}`);
  for (const [name, value] of Object.entries(facts.engine)) {
    words.push(`--${optionName(name)} ${value}`);
  }
  for (const [name, value] of Object.entries(branch.sampling)) {
    if (value !== facts.sampling[name]) words.push(`--${optionName(name)} ${value}`);
  }
  if ((branch.sampling.repetition_penalty ?? 1) !== 1) words.push('--no-penalize-prompt');
  return words.join(' ');
}
