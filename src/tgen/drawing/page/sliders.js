'use strict';
/* Sliders of sampling options. */

const TOP_K_STOPS = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200,
  300, 500, 1000, 2000, 5000];
const SLIDERS = {
  temperature: { min: 0, max: 2, step: 0.01 },
  top_k: { off: 0 },
  top_p: { min: 0.01, max: 1, step: 0.01, off: 1 },
  min_p: { min: 0, max: 0.5, step: 0.005, off: 0 },
  repetition_penalty: { min: 1, max: 2, step: 0.01, off: 1 },
};
const optionName = (name) => name.replace('_', '-');

/* Fill the box with one slider per setting; they change `settings`, and call `onChange`. */
function addSliders(box, settings, vocabularySize, onChange) {
  box.replaceChildren();
  for (const name of Object.keys(settings)) {
    const { min, max, step, off } = SLIDERS[name];
    const stops = name === 'top_k' && [...new Set(
      [...TOP_K_STOPS.filter((k) => k < vocabularySize), settings.top_k])].sort((a, b) => a - b);
    const input = make('input', { type: 'range', id: name, ...(stops
      ? { min: 0, max: stops.length - 1, step: 1 }
      : { min: Math.min(min, settings[name]), max: Math.max(max, settings[name]), step }) });
    const output = make('output', { htmlFor: name });
    const showValue = () => {
      output.textContent = settings[name] === off ? 'off' : String(settings[name]);
      input.setAttribute('aria-valuetext', output.textContent);
    };
    input.value = stops ? stops.indexOf(settings[name]) : settings[name];
    input.addEventListener('input', () => {
      settings[name] = stops ? stops[Number(input.value)] : Number(input.value);
      showValue();
      onChange();
    });
    showValue();
    box.append(make('label', { htmlFor: name }, optionName(name)), input, output);
  }
}
