// SPDX-License-Identifier: Apache-2.0
// Whether routing helps: the estimate for each model, and what --holdout-share has measured.
import { Table, count, element, find, length, milliseconds, number, percent, plain, put, svg } from './dom.js'

const meaning = 'An estimate: the tokens that the chosen worker has cached, less the mean over all candidates, in caches that kvroute\'s own routing has filled. ' +
  'Under round robin the caches would contain other blocks. --holdout-share measures the difference of such requests.'

export const benefit = new Table(find('benefit'), 'What routing by cache saves, by model', [
  { name: 'Model', field: 'model', show: (b) => plain([b.model, b.group && `group ${b.group}`].filter(Boolean).join(' · ')) },
  {
    name: 'Prefill saved', field: 'saved_share',
    show: (b) => (b.saved_share === undefined ? { text: b.why ? `no estimate: ${b.why}` : '', title: meaning } : { text: percent(b.saved_share), value: b.saved_share, share: Math.max(0, b.saved_share), title: `${b.saved_share}. ${meaning}` }),
  },
  {
    name: 'First token sooner by', field: 'saved_ms',
    show: (b) => (b.saved_ms === undefined
      ? { title: b.why ?? 'No worker has computed enough prompts of different lengths lately.' }
      : length(b.saved_ms, { title: `${b.saved_ms} ms, the mean of ${number(b.rated_requests)} requests: the saved tokens by the time that each further token takes on the worker, as measured, without the fixed time of a request. ${meaning}` })),
  },
  { name: 'Tokens saved', field: 'saved_tokens', show: (b) => count(b.saved_tokens, { title: meaning }) },
  { name: 'Requests', field: 'requests', show: (b) => count(b.requests) },
], (b) => JSON.stringify([b.model, b.group]))

const size = { width: 560, panel: 52, left: 4, axis: 18 }

// sentence says what the comparison shows.
function sentence(m) {
  if (m.difference_ms === undefined) return `No difference is computed yet: ${m.why ?? 'there are too few requests'}.`
  const interval = `${milliseconds(m.low_ms)} to ${milliseconds(m.high_ms)}`
  if (m.low_ms > 0) return `First tokens come ${milliseconds(m.difference_ms)} sooner than those of round-robin requests (95 %: ${interval}).`
  if (m.high_ms < 0) return `First tokens come ${milliseconds(-m.difference_ms)} later than those of round-robin requests (95 %: ${milliseconds(-m.high_ms)} to ${milliseconds(-m.low_ms)}).`
  return `No difference is shown yet: ${milliseconds(m.difference_ms)} (95 %: ${interval}).`
}

const sides = [['routed', 'by cache'], ['round_robin', 'round robin']]
const columns = [
  { name: 'Requests', field: 'side', show: ([, name]) => plain(name) },
  { name: 'Number', field: 'requests', show: ([, , s]) => count(s.requests) },
  ...[['Mean', 'mean_ms'], ['Median', 'p50_ms'], ['p90', 'p90_ms'], ['p99', 'p99_ms']].map(([name, field]) => ({ name, field, show: ([, , s]) => length(s[field]) })),
]

// Comparison shows a model of the holdout: both distributions above one axis, and the interval of the difference.
class Comparison {
  constructor(model) {
    this.words = element('p', { className: 'lead' })
    this.words.dataset.field = 'difference_ms'
    const table = element('table')
    this.drawing = svg('svg', { role: 'img', width: '100%' })
    const box = element('div', { className: 'scroll', tabIndex: 0, attributes: { role: 'group', 'aria-label': `First tokens of ${model}` } }, table)
    this.element = element('figure', {}, element('figcaption', {}, `Measured: ${model}`), this.words, element('div', { className: 'both' }, this.drawing, box))
    this.element.dataset.key = model
    this.table = new Table(table, `Time to first token of ${model}`, columns, ([field]) => field)
  }

  draw(m) {
    put(this.words, { text: sentence(m), value: m.difference_ms, title: m.difference_ms === undefined ? '' : `${m.difference_ms} ms, ${m.low_ms} to ${m.high_ms} ms` })
    this.table.fill(sides.filter(([field]) => m[field]).map(([field, name]) => [field, name, m[field]]))
    const parts = JSON.stringify([m.buckets, m.difference_ms, m.low_ms, m.high_ms])
    if (parts === this.parts) return
    this.parts = parts
    this.drawing.setAttribute('viewBox', `0 0 ${size.width} ${2 * size.panel + size.axis + (m.difference_ms === undefined ? 0 : 34)}`)
    this.drawing.replaceChildren(...this.bars(m.buckets ?? []), ...this.interval(m))
    this.drawing.setAttribute('aria-label', `Distributions of the time to first token. ${sentence(m)}`)
  }

  bars(buckets) {
    const step = (size.width - 2 * size.left) / Math.max(1, buckets.length)
    const shares = sides.map(([field]) => {
      const sum = buckets.reduce((n, b) => n + b[field], 0)
      return buckets.map((b) => b[field] / Math.max(1, sum))
    })
    const top = Math.max(...shares.flat(), 1e-9)
    const drawn = shares.flatMap((list, side) => list.map((share, i) => {
      const height = (size.panel * share) / top
      const y = side === 0 ? size.panel - height : size.panel
      return svg('rect', { class: `side-${side}`, x: (size.left + i * step).toFixed(1), y: y.toFixed(1), width: Math.max(1, step - 1).toFixed(1), height: height.toFixed(1) })
    }))
    drawn.push(svg('line', { class: 'grid', x1: size.left, x2: size.width - size.left, y1: size.panel, y2: size.panel }))
    sides.forEach(([, name], i) => drawn.push(svg('text', { class: 'tick', x: size.width - size.left, y: i ? 2 * size.panel - 2 : 12, 'text-anchor': 'end' }, name)))
    const marks = Math.min(6, buckets.length)
    for (let i = 0; i < marks; i++) {
      const at = Math.round((i * (buckets.length - 1)) / Math.max(1, marks - 1))
      drawn.push(svg('text', { class: 'tick', x: (size.left + at * step).toFixed(1), y: 2 * size.panel + 14, 'text-anchor': i && i === marks - 1 ? 'end' : 'start' }, milliseconds(buckets[at].from_ms)))
    }
    return drawn
  }

  // interval draws the difference with its interval on an axis of its own, which has the zero.
  interval(m) {
    if (m.difference_ms === undefined) return []
    const [low, high] = [Math.min(0, m.low_ms), Math.max(0, m.high_ms)]
    const x = (ms) => (60 + ((size.width - 120) * (ms - low)) / (high - low || 1)).toFixed(1)
    const y = 2 * size.panel + size.axis + 10
    return [
      svg('line', { class: 'cursor', x1: x(0), x2: x(0), y1: y - 8, y2: y + 8 }),
      svg('text', { class: 'tick', x: x(0), y: y + 20, 'text-anchor': 'middle' }, '0'),
      svg('line', { class: 'span', x1: x(m.low_ms), x2: x(m.high_ms), y1: y, y2: y }),
      svg('circle', { class: 'dot', cx: x(m.difference_ms), cy: y, r: 4 }),
      svg('text', { class: 'tick', x: x(m.difference_ms), y: y + 20, 'text-anchor': 'middle' }, Math.abs(x(m.difference_ms) - x(0)) > 40 ? milliseconds(m.difference_ms) : ''),
    ]
  }
}

const shown = new Map()

// drawHoldout shows the models of the holdout, or how to turn it on.
export function drawHoldout(holdout) {
  const models = holdout?.models ?? []
  const keys = models.map((m) => m.model)
  if (keys.join() !== [...shown.keys()].join()) {
    const old = new Map(shown)
    shown.clear()
    for (const key of keys) shown.set(key, old.get(key) ?? new Comparison(key))
    find('holdout').replaceChildren(...[...shown.values()].map((c) => c.element))
  }
  models.forEach((m) => shown.get(m.model).draw(m))
  put(find('holdout-note'), {
    value: holdout?.share,
    text: !holdout ? 'The estimate is not a measurement. With --holdout-share 0.05, kvroute routes 5 % of the conversations round robin, and this page compares their first tokens.'
      : models.length ? 'Compared with round-robin requests in a fleet that kvroute fills, not with a round-robin fleet.'
        : `${percent(holdout.share)} of the conversations are routed round robin. Their first tokens are compared as soon as there are some.`,
  })
}
