// SPDX-License-Identifier: Apache-2.0
// The dialog with one decision: the lines and the table that `kvroute explain` prints.
import { parse } from './feed.js'
import { Table, clock, count, duration, element, find, milliseconds, number, plain, workerName } from './dom.js'

const signs = {
  order: 'inferred: a later request had its first token',
  rate: "inferred from the worker's rate",
  end: 'at the latest: the response was not streamed',
}

const figure = (field) => (c) => {
  const value = c[field] ?? 0
  return { text: String(value), value }
}

// columns of the candidates, as kvroute explain prints them.
const columns = (d) => [
  { name: 'worker', field: 'worker', show: (c) => plain(workerName(c.worker, c.worker_name), { title: c.address }) },
  ...[
    ['cached', 'overlap_blocks'], ['coming', 'pending_blocks'], ['host', 'host_blocks'], ['disk', 'disk_blocks'], ['pending', 'pend_tokens'], ['waiting', 'waiting_requests'],
    ['requests', 'active_requests'], ['decoding', 'decode_tokens'], ['to decode', 'waiting_tokens'], ['active', 'active_blocks'], ['adds', 'additional_blocks'], ['kv use', 'kv_use'],
    ['places', 'max_requests'], ['speed', 'speed'], ['taints', 'taint_weight'], ['delay', 'decode_delay_tokens'],
  ].map(([name, field]) => ({ name, field, show: figure(field) })),
  { name: 'cost', field: 'cost', show: (c) => (d.policy && !c.excluded ? { text: String(c.cost), value: c.cost } : {}) },
  ...(drawn(d) ? [{ name: 'chance', field: 'probability', show: figure('probability') }] : []),
  { name: 'verdict', field: 'verdict', left: true, show: (c) => verdict(c, d) },
]

const drawn = (d) => Boolean(d.policy && d.settings?.router_temperature > 0)

const same = (a, b) => a.worker_id === b.worker_id && a.dp_rank === b.dp_rank

function verdict(c, d) {
  let text = same(c.worker, d.worker) ? '← chosen' : c.excluded ? `not: ${c.excluded}` : ''
  if (c.group && c.probed) text += ' (group: asked)'
  else if (c.group && c.summary_age_ns < 0) text += ` (group: no summary, members ${c.members ?? 0})`
  else if (c.group) text += ` (group: members ${c.members ?? 0}, summary ${duration(c.summary_age_ns ?? 0)} ago)`
  const f = c.foreign
  if (f) text += ` (includes load that kvroute did not send: ${f.requests} requests, ${f.waiting} waiting with about ${f.tokens} tokens, ${f.blocks} blocks)`
  return { text, value: text, tone: same(c.worker, d.worker) ? 'good' : c.excluded ? 'quiet' : '' }
}

function reason(d) {
  const other = { pinned: 'the request names it', preferred: 'the upper router asked for it', session: 'its session is bound to it', 'round-robin': `mode ${d.mode}`, mode: `mode ${d.mode}` }
  if (other[d.reason]) return `${d.reason}: ${other[d.reason]}`
  const equal = d.equal > 1 ? `; ${d.equal} cost the same: fewer requests, then fewer blocks, then a draw` : ''
  return `${d.reason}: cost ${d.cost} by ${d.policy || 'a rule of its own'}${drawn(d) ? '; drawn by temperature' : equal}`
}

// policySettings are the settings that each cost uses.
const policySettings = {
  tokens: 'alpha attention decode_weight kv_read host_cache_weight disk_cache_weight',
  dynamo: 'overlap_score_weight',
  dynamo_newer: 'overlap_score_credit overlap_score_credit_decay prefill_load_scale active_request_weight host_cache_weight disk_cache_weight',
  predicted_ttft: 'alpha decode_weight kv_read host_cache_weight disk_cache_weight',
  weighted: 'max_batch weighted_overlap weighted_requests weighted_kv_use decode_weight kv_read',
}

function settings(d) {
  const used = `${policySettings[d.policy] ?? ''} router_temperature`.trim().split(' ')
  const parts = { predicted_ttft: Object.keys(d.settings.engine), tokens: ['floor', 'token'] }[d.policy] ?? []
  const engine = parts.map((name) => `engine ${name} ${d.settings.engine[name]}`)
  const not = [!d.settings.track_prefill_tokens && 'prefill is not tracked', !d.settings.assume_kv_reuse && 'no reuse is assumed'].filter(Boolean)
  return [`cost ${d.policy}`, ...used.map((name) => `${name} ${d.settings[name] ?? 0}`), ...engine, ...not].join(', ')
}

function choice(d) {
  return [
    ['settings', d.policy && d.settings && settings(d)],
    ['output', d.policy && `${number(d.expected_output_tokens)} tokens expected`],
    ['in use', d.active_prefix_tokens && `the first ${number(d.active_prefix_tokens)} tokens, by requests on the worker that has most of the prompt; it has ${number(d.active_prefix_requests)}`],
    ['worker', `${workerName(d.worker, d.worker_name)} at ${d.address}`],
    ['member', d.member && `${workerName(d.member, '')}, named by the group`],
    ['reason', reason(d)],
    ['expected', `${d.overlap_blocks} of its blocks are cached, ${number(d.prefill_tokens)} tokens to compute, first token in ` +
      `${milliseconds(d.estimated_ttft_ms)} (${milliseconds(d.coarse_ttft_ms)} by rule of thumb)`],
  ]
}

function lines(d) {
  const after = (time) => milliseconds(new Date(time) - new Date(d.time))
  const steps = [['waited', d.queue_ns], ['probe', d.probe_ns], ['tokens', d.tokenize_ns], ['hashes', d.hash_ns], ['match', d.match_ns], ['choice and booking', d.pick_ns]]
  const mode = { 'round-robin': `, turn ${d.turn}`, 'device-aware': `, ratio ${d.device_ratio}, random number ${d.draw}` }[d.mode] ?? `, random number ${d.draw}`
  const thresholds = Object.entries(d.thresholds ?? {}).map(([name, value]) => `${name} ${value}`).join(', ')
  const by = signs[d.first_token_by] ?? `reported by ${d.first_token_by}`
  return [
    ['time', `${clock(d.time)}, ${d.time}`],
    ['model', d.model],
    ['prompt', `${number(d.prompt_tokens)} tokens (${[d.token_mode, d.token_reason].filter(Boolean).join(': ')}), ${d.prompt_blocks} full blocks of ${d.block_size}`],
    ['mode', d.mode + mode],
    ['thresholds', thresholds],
    ...choice(d),
    ['prefill leg', d.no_prefill && (d.prefill ? `${d.no_prefill}: the worker computes the prompt` : `none: ${d.no_prefill}`)],
    ['steps', steps.filter(([name, ns]) => ns > 0 || name === 'match').map(([name, ns]) => `${name} ${duration(ns ?? 0)}`).join(', ')],
    ['first token', d.first_token ? `after ${after(d.first_token)}, ${by}` : d.first_token_by === 'end' && 'not seen before the end of the response'],
    ['end', d.freed && `after ${after(d.freed)}`],
    ['usage', d.usage && `${number(d.usage.prompt_tokens)} prompt tokens, ${d.usage.cached_reported ? number(d.usage.cached_tokens) : 'an unknown number'} of them cached, ${number(d.usage.output_tokens)} output tokens, by the response`],
  ]
}

const list = (pairs) => element('dl', { className: 'pairs' }, ...pairs.filter(([, text]) => text).flatMap(([name, text]) => [element('dt', {}, name), element('dd', {}, text)]))

function candidates(d, caption) {
  const table = element('table')
  const box = element('div', { className: 'scroll', tabIndex: 0, attributes: { role: 'group', 'aria-label': caption } }, table)
  new Table(table, caption, columns(d), (c) => `${c.worker.worker_id}/${c.worker.dp_rank}`).fill(d.candidates ?? [], 'The candidates are not kept.')
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
    error.textContent = ''
    title.textContent = `Decision ${id}`
    this.asked = id
    if (!this.dialog.open) this.dialog.showModal()
    try {
      const d = parse(await (await this.get(`v1/decisions?id=${encodeURIComponent(id)}`)).text())
      if (this.asked !== id) return
      body.append(list(lines(d)), candidates(d, 'Candidates'))
      if (d.prefill) body.append(element('h3', {}, 'Prefill leg'), list(choice(d.prefill)), candidates(d.prefill, 'Candidates of the prefill leg'))
      body.append(element('p', { className: 'note' }, 'cached, host, disk: blocks of the prompt; coming: cached blocks that another request still computes; active, adds: blocks of requests; ' +
        'pending: prefill tokens; decoding, to decode: tokens that requests hold, after and before their first token; waiting: requests before it; ' +
        'places: requests that the engine computes at a time, 0 if unknown; speed: compared with the pool; delay: part of the cost for requests that decode there, in tokens. docs/routing.md has the formulas.'))
      body.dataset.id = d.id
    } catch (problem) {
      error.textContent = `The decision cannot be read: ${problem.message}`
    }
  }
}
