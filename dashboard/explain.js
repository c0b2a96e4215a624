// SPDX-License-Identifier: Apache-2.0
// The dialog with one decision: the lines and the table that `kvroute explain` prints.
import { parse } from './feed.js'
import { Table, clip, clock, count, duration, element, find, milliseconds, number, plain, put, several, workerName } from './dom.js'

const figure = (field) => (c) => count(c[field] ?? 0)

// columns of the candidates, as kvroute explain prints them, but the verdict is at the left, where no figure pushes it
// out of the window. Those with only zeros are hidden.
const columns = (d) => [
  { name: 'worker', field: 'worker', show: (c) => plain(workerName(c.worker, c.worker_name), { title: `${workerName(c.worker, c.worker_name)}, ${c.address}` }) },
  { name: 'verdict', field: 'verdict', left: true, wrap: true, show: (c) => verdict(c, d) },
  { name: 'cost', field: 'cost', show: (c) => (d.policy && !c.excluded ? count(c.cost) : {}) },
  ...(drawn(d) ? [{ name: 'chance', field: 'probability', show: figure('probability') }] : []),
  ...[
    ['cached', 'overlap_blocks'], ['coming', 'pending_blocks'], ['host', 'host_blocks'], ['disk', 'disk_blocks'], ['pending', 'pend_tokens'], ['waiting', 'waiting_requests'],
    ['requests', 'active_requests'], ['decoding', 'decode_tokens'], ['to decode', 'waiting_tokens'], ['active', 'active_blocks'], ['adds', 'additional_blocks'], ['kv use', 'kv_use'],
    ['places', 'max_requests'], ['speed', 'speed'], ['taints', 'taint_weight'], ['delay', 'decode_delay_tokens'],
  ].map(([name, field]) => ({ name, field, spare: true, show: figure(field) })),
]

const drawn = (d) => Boolean(d.policy && d.settings?.router_temperature > 0)

const same = (a, b) => a.worker_id === b.worker_id && a.dp_rank === b.dp_rank

function verdict(c, d) {
  const text = c.verdict_text ?? ''
  return { text, value: text, tone: same(c.worker, d.worker) ? 'good' : c.excluded ? 'quiet' : '' }
}

// ordered returns the candidates: the chosen one, then the others by their cost, then those that could not be chosen.
function ordered(d) {
  const place = (c) => (same(c.worker, d.worker) ? 0 : c.excluded ? 2 : 1)
  return (d.candidates ?? []).toSorted((a, b) => place(a) - place(b) || a.cost - b.cost)
}

function choice(d) {
  const expected = d.expected_ttft_ms === undefined ? '' : `, first token expected in ${milliseconds(d.expected_ttft_ms)}, by the first tokens measured on the worker`
  return [
    ['worker', `${workerName(d.worker, d.worker_name)} at ${d.address}`],
    ['kind of reason', d.reason],
    ['settings', d.settings_text],
    ['output', d.policy && `${number(d.expected_output_tokens)} tokens expected`],
    ['in use', d.active_prefix_tokens && `the first ${number(d.active_prefix_tokens)} tokens, by requests on the worker that has most of the prompt; it has ${number(d.active_prefix_requests)}`],
    ['expected', `${several(d.overlap_blocks, 'block')} of the prompt cached, ${number(d.prefill_tokens)} tokens to compute${expected}`],
    ['comparison', d.holdout && (d.holdout === 'routed' ? 'routed, and compared with round-robin requests' : 'routed round robin, for the comparison of --holdout-share')],
  ]
}

function lines(d) {
  const after = (time) => milliseconds(new Date(time) - new Date(d.time))
  const steps = [['waited', d.queue_ns], ['probe', d.probe_ns], ['tokens', d.tokenize_ns], ['hashes', d.hash_ns], ['match', d.match_ns], ['choice and booking', d.pick_ns]]
  const thresholds = Object.entries(d.thresholds ?? {}).map(([name, value]) => `${name} ${value}`).join(', ')
  return [
    ['id', d.id],
    ['time', `${clock(d.time)}, ${d.time}`],
    ['model', d.model],
    ['prompt', `${number(d.prompt_tokens)} tokens (${[d.token_mode, d.token_reason].filter(Boolean).join(': ')}), ${several(d.prompt_blocks, 'full block')} of ${d.block_size}`],
    ['mode', d.mode_text],
    ['thresholds', thresholds],
    ...choice(d),
    ['prefill leg', d.no_prefill && (d.prefill ? `${d.no_prefill}: the worker computes the prompt` : `none: ${d.no_prefill}`)],
    ['steps', steps.filter(([name, ns]) => ns > 0 || name === 'match').map(([name, ns]) => `${name} ${duration(ns ?? 0)}`).join(', ')],
    ['served by', d.served && `${d.served}, because the chosen worker did not take the request`],
    ['first token', d.first_token ? `after ${after(d.first_token)}, ${d.first_token_text}` : d.first_token_text],
    ['end', d.freed && `after ${after(d.freed)}`],
    ['usage', d.usage && `${number(d.usage.prompt_tokens)} prompt tokens, ${d.usage.cached_reported ? number(d.usage.cached_tokens) : 'an unknown number'} of them cached, ${number(d.usage.output_tokens)} output tokens, by the response`],
  ]
}

const list = (pairs) => element('dl', { className: 'pairs' }, ...pairs.filter(([, text]) => text).flatMap(([name, text]) => [element('dt', {}, name), element('dd', {}, text)]))

function candidates(d, caption) {
  const table = element('table')
  const box = element('div', { className: 'scroll', tabIndex: 0, attributes: { role: 'group', 'aria-label': caption } }, table)
  const shown = new Table(table, caption, columns(d), (c) => `${c.worker.worker_id}/${c.worker.dp_rank}`, (c) => same(c.worker, d.worker))
  shown.fill(ordered(d), 'The candidates are not kept.')
  if (shown.left.length && d.candidates?.length) box.append(element('p', { className: 'note' }, `Columns with only zeros are hidden: ${shown.left.join(', ')}.`))
  if (d.candidates_omitted) {
    const text = `Not stored: ${number(d.candidates_omitted)} more workers of the pool. Those above have the lowest costs.`
    box.append(element('p', { className: 'note omitted' }, text))
  }
  return box
}

// Explain opens the dialog. get(path) requests a path of the API.
export class Explain {
  constructor(get) {
    this.get = get
    this.dialog = find('explain')
    find('close').addEventListener('click', () => this.dialog.close())
  }

  async open(id) {
    const [body, error, title] = ['explain-body', 'explain-error', 'explain-title'].map(find)
    body.replaceChildren()
    delete body.dataset.id
    error.textContent = ''
    put(title, { text: `Decision ${clip(id, 100)}` })
    this.asked = id
    if (!this.dialog.open) this.dialog.showModal()
    try {
      const d = parse(await (await this.get(`v1/decisions?id=${encodeURIComponent(id)}`)).text())
      if (this.asked !== id) return
      body.append(element('p', { className: 'lead' }, d.reason_text), candidates(d, 'Candidates'), list(lines(d)))
      if (d.prefill) body.append(element('h3', {}, 'Prefill leg'), element('p', { className: 'lead' }, d.prefill.reason_text), list(choice(d.prefill)), candidates(d.prefill, 'Candidates of the prefill leg'))
      body.append(element('p', { className: 'note' }, 'cached, host, disk: blocks of the prompt; coming: cached blocks that another request still computes; active, adds: blocks of requests; ' +
        'pending: prefill tokens; decoding, to decode: tokens that requests hold, after and before their first token; waiting: requests before it; ' +
        'places: requests that the engine computes at a time, 0 if unknown; speed: compared with the pool; delay: part of the cost for requests that decode there, in tokens. docs/routing.md has the formulas.'))
      body.dataset.id = d.id
    } catch (problem) {
      error.textContent = problem.status === 404 ? `No decision with the id ${clip(id, 100)} is known. kvroute keeps the newest --keep-decisions of them.` : `The decision cannot be read: ${problem.message}`
    }
  }
}
