'use strict';
/* Small pictures of heads: a grid of buttons, one row per layer, with one Tab stop. */

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const headName = (head) => (head === null ? 'mean' : String(head));

class Thumbnails {
  /* `onSelect` receives the matrix of the button that is clicked or reached by keyboard. */
  constructor(box, onSelect) {
    this.box = box;
    this.onSelect = onSelect;
    box.addEventListener('keydown', (event) => {
      if (!(event.key in ARROWS)) return;
      event.preventDefault();
      this.move(...ARROWS[event.key]);
      this.selected.focus();
    });
  }

  /* Draw matrices, one pixel per `factor` by `factor` weights; missing heads leave gaps. */
  show(matrices, colors, { factor = 1, roleOf = () => '' } = {}) {
    const sorted = (name) => [...new Set(matrices.map((one) => one[name]))].sort((a, b) => a - b);
    const [layers, heads] = [sorted('layer'), sorted('head')];
    this.box.style.setProperty('--heads', heads.length);
    this.box.replaceChildren(make('span'), ...heads.map((head) => make('span', {}, headName(head))));
    this.rows = layers.map((layer) => {
      this.box.append(make('span', {}, layer));
      return heads.map((head) => {
        const matrix = matrices.find((one) => one.layer === layer && one.head === head);
        const button = matrix && this.makeButton(matrix, colors, factor, roleOf(matrix));
        this.box.append(button ?? make('span'));
        return button;
      });
    });
  }

  makeButton(matrix, colors, factor, role) {
    const { layer, head } = matrix;
    const canvas = make('canvas');
    paint(canvas, matrix, colors, factor);
    const name = `Layer ${layer}, head ${headName(head)}${role ? `: ${role}` : ''}`;
    const button = make('button', {
      type: 'button', title: name, 'aria-label': name,
      'data-layer': layer, 'data-head': headName(head),
    }, canvas);
    button.addEventListener('click', () => this.onSelect(matrix));
    return button;
  }

  /* Mark the selected head. */
  mark({ layer, head }) {
    for (const button of this.box.querySelectorAll('button')) {
      const { dataset } = button;
      const isSelected = dataset.layer === String(layer) && dataset.head === headName(head);
      button.setAttribute('aria-pressed', isSelected);
      button.tabIndex = isSelected ? 0 : -1;
      if (isSelected) {
        this.selected = button;
        const { offsetLeft, offsetTop, offsetWidth, offsetHeight } = button;
        reveal(this.box, offsetLeft, offsetTop, offsetWidth, offsetHeight);
      }
    }
  }

  /* Select the next head in a direction. */
  move(down, across) {
    let row = this.rows.findIndex((buttons) => buttons.includes(this.selected));
    let column = this.rows[row].indexOf(this.selected);
    do {
      row += down;
      column += across;
      if (!(column in (this.rows[row] ?? []))) return;
    } while (!this.rows[row][column]);
    this.rows[row][column].click();
  }
}
