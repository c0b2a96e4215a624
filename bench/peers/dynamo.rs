// SPDX-License-Identifier: Apache-2.0

//! Measures one shape on the concurrent compressed radix tree of `dynamo-kv-router`
//! and prints the figure. All workers name a block by the same engine hash: where
//! they do not, this tree remembers one worker only. The shapes are those of bench/parts/index.go, where they are
//! described; `make bench-peers` runs both in turn.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};

/// Counts the bytes in use and the allocations.
struct Counting;

static BYTES: AtomicIsize = AtomicIsize::new(0);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size() as isize, Ordering::Relaxed);
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        unsafe { System.dealloc(p, layout) }
    }
}

/// Counting costs time, so only the shapes about memory pay for it.
struct Allocator;

static COUNT: AtomicBool = AtomicBool::new(false);

unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNT.load(Ordering::Relaxed) {
            return unsafe { Counting.alloc(layout) };
        }
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        if COUNT.load(Ordering::Relaxed) {
            return unsafe { Counting.dealloc(p, layout) };
        }
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const BATCH: usize = 32;
const SEQUENCE: usize = 512;
const PAIRS: usize = 1 << 20;

fn mix(v: u64) -> u64 {
    let mut x = v.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn sequence(number: usize, blocks: usize) -> Vec<u64> {
    (0..blocks).map(|i| mix((number as u64) << 20 | i as u64)).collect()
}

fn engine_seed(worker: usize, agree: bool) -> u64 {
    if agree { 1 << 60 } else { (worker as u64 + 1) << 48 }
}

fn event(worker: usize, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(worker as u64, KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

fn block(external: u64, local: u64) -> KvCacheStoredBlockData {
    KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(external),
        tokens_hash: LocalBlockHash(local),
        mm_extra_info: None,
    }
}

fn store(worker: usize, parent: Option<u64>, blocks: Vec<KvCacheStoredBlockData>) -> RouterEvent {
    let parent_hash = parent.map(ExternalSequenceBlockHash);
    event(worker, KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks }))
}

fn stored(out: &mut Vec<RouterEvent>, worker: usize, seed: u64, local: &[u64]) {
    let mut parent = None;
    for part in local.chunks(BATCH) {
        let blocks: Vec<_> = part.iter().map(|&l| block(mix(seed ^ l), l)).collect();
        let last = blocks[blocks.len() - 1].block_hash.0;
        out.push(store(worker, parent, blocks));
        parent = Some(last);
    }
}

fn unique() -> Vec<RouterEvent> {
    let mut out = Vec::new();
    for n in 0..PAIRS / SEQUENCE {
        stored(&mut out, n % 64, engine_seed(n % 64, false), &sequence(n, SEQUENCE));
    }
    out
}

fn shared(agree: bool) -> Vec<RouterEvent> {
    let mut out = Vec::new();
    for n in 0..PAIRS / SEQUENCE / 64 {
        let local = sequence(n, SEQUENCE);
        for w in 0..64 {
            stored(&mut out, w, engine_seed(w, agree), &local);
        }
    }
    out
}

fn removals(events: &[RouterEvent], batch: usize, random: bool) -> Vec<RouterEvent> {
    let mut out = Vec::new();
    for e in events.iter().rev() {
        let KvCacheEventData::Stored(data) = &e.event.data else { unreachable!() };
        let all: Vec<_> = data.blocks.iter().rev().map(|b| b.block_hash).collect();
        for part in all.chunks(batch) {
            let data = KvCacheRemoveData { block_hashes: part.to_vec() };
            out.push(event(e.worker_id as usize, KvCacheEventData::Removed(data)));
        }
    }
    if random {
        for i in (1..out.len()).rev() {
            let j = (mix(i as u64) % (i as u64 + 1)) as usize;
            out.swap(i, j);
        }
        // As they are received, one after the other in memory.
        out = out.iter().cloned().collect();
    }
    out
}

fn blocks_of(events: &[RouterEvent]) -> usize {
    events
        .iter()
        .map(|e| match &e.event.data {
            KvCacheEventData::Stored(d) => d.blocks.len(),
            KvCacheEventData::Removed(d) => d.block_hashes.len(),
            KvCacheEventData::Cleared => 0,
        })
        .sum()
}

/// A tree with the one thread that applies its events.
struct Index {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
}

impl Index {
    fn new() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, received) = flume::unbounded();
        let writer = tree.clone();
        thread::spawn(move || writer.worker(received, None));
        Index { tree, tasks }
    }

    /// Returns when all is applied. Some thousand events wait at a time, so that the
    /// queue's own memory does not count as the tree's.
    fn apply(&self, events: Vec<RouterEvent>) {
        let (mut waiting, mut left) = (0, events.len());
        for event in events {
            (waiting, left) = (waiting + 1, left - 1);
            if waiting < 8192 && left > 0 {
                self.tasks.send(WorkerTask::Event(event)).expect("the writer lives");
                continue;
            }
            let (resp, done) = tokio::sync::oneshot::channel();
            self.tasks.send(WorkerTask::EventWithAck { event, resp }).expect("the writer lives");
            done.blocking_recv().expect("the writer answers");
            waiting = 0;
        }
    }

    /// Returns millions of blocks a second.
    fn rate(&self, events: Vec<RouterEvent>) -> f64 {
        let blocks = blocks_of(&events) as f64;
        let start = Instant::now();
        self.apply(events);
        blocks / start.elapsed().as_secs_f64() / 1e6
    }
}

fn hashes(local: &[u64]) -> Vec<LocalBlockHash> {
    local.iter().map(|&l| LocalBlockHash(l)).collect()
}

fn full_path(workers: usize, agree: bool) -> (Index, Vec<LocalBlockHash>) {
    let index = Index::new();
    let local = sequence(0, SEQUENCE);
    let mut events = Vec::new();
    for w in 0..workers {
        stored(&mut events, w, engine_seed(w, agree), &local);
    }
    index.apply(events);
    (index, hashes(&local))
}

fn branched_path(nodes: usize) -> (Index, Vec<LocalBlockHash>) {
    let index = Index::new();
    let local = sequence(0, SEQUENCE);
    let stride = SEQUENCE / nodes;
    let mut events = Vec::new();
    for w in 0..64 {
        let seed = engine_seed(w, true);
        let depth = ((w + 1) * SEQUENCE / 64 / stride * stride).max(stride);
        stored(&mut events, w, seed, &local[..depth]);
        for at in (stride..depth).step_by(stride) {
            if at / stride % 64 == w || w == 63 {
                let branch = block(mix((w as u64) << 32 | at as u64), at as u64);
                events.push(store(w, Some(mix(seed ^ local[at - 1])), vec![branch]));
            }
        }
    }
    index.apply(events);
    (index, hashes(&local))
}

fn percentile(mut times: Vec<f64>, p: usize) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() * p / 100] * 1e6
}

fn match_time((index, local): (Index, Vec<LocalBlockHash>), scores_alone: bool) -> f64 {
    let look = || {
        if scores_alone {
            index.tree.find_matches_impl(&local, false).scores.len()
        } else {
            index.tree.find_match_details_impl(&local, false).overlap_scores.scores.len()
        }
    };
    assert_ne!(look(), 0);
    let times = (0..2000)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..8 {
                std::hint::black_box(look());
            }
            start.elapsed().as_secs_f64() / 8.0
        })
        .collect();
    percentile(times, 50)
}

fn match_allocations() -> f64 {
    let (index, local) = full_path(64, true);
    COUNT.store(true, Ordering::Relaxed);
    for _ in 0..1000 {
        std::hint::black_box(index.tree.find_match_details_impl(&local, false));
    }
    ALLOCATIONS.load(Ordering::Relaxed) as f64 / 1000.0
}

fn match_under_load() -> f64 {
    let (index, local) = full_path(64, true);
    let mut events = unique();
    events.truncate(PAIRS / BATCH / 4);
    let gone = removals(&events, BATCH, false);
    let stop = Arc::new(AtomicBool::new(false));
    let (tasks, stopped) = (index.tasks.clone(), stop.clone());
    // Cloning events is slower than applying them, so the writer's own thread must
    // never wait: it finds rounds of them ready.
    let feeder = thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            if tasks.len() > 4 * events.len() {
                thread::sleep(std::time::Duration::from_micros(200));
                continue;
            }
            for e in events.iter().chain(gone.iter()) {
                let _ = tasks.send(WorkerTask::Event(e.clone()));
            }
        }
    });
    while index.tasks.len() < PAIRS / BATCH / 2 {
        thread::yield_now();
    }
    let times = (0..100_000)
        .map(|_| {
            let start = Instant::now();
            std::hint::black_box(index.tree.find_match_details_impl(&local, false));
            start.elapsed().as_secs_f64()
        })
        .collect();
    stop.store(true, Ordering::Relaxed);
    feeder.join().expect("the feeder ends");
    percentile(times, 99)
}

fn match_random() -> f64 {
    const PROMPTS: usize = 10_000;
    const EACH: usize = 500_000;
    let index = Index::new();
    let mut events = Vec::new();
    let mut prompts = Vec::new();
    for n in 0..PROMPTS {
        let local = sequence(n, 32);
        for w in 0..4 {
            stored(&mut events, w, engine_seed(w, true), &local);
        }
        prompts.push(hashes(&local));
    }
    index.apply(events);
    let start = Instant::now();
    thread::scope(|s| {
        for t in 0..2u64 {
            let (index, prompts) = (&index, &prompts);
            s.spawn(move || {
                for i in 0..EACH as u64 {
                    let prompt = &prompts[(mix(t << 32 | i) % PROMPTS as u64) as usize];
                    std::hint::black_box(index.tree.find_match_details_impl(prompt, false));
                }
            });
        }
    });
    2.0 * EACH as f64 / start.elapsed().as_secs_f64() / 1e6
}

fn remove_rate(events: Vec<RouterEvent>, batch: usize, random: bool) -> f64 {
    let gone = removals(&events, batch, random);
    let index = Index::new();
    index.apply(events);
    index.rate(gone)
}

/// What the events themselves take is counted before the index gets them, and freed
/// by it.
fn pair_bytes(make: impl Fn() -> Vec<RouterEvent>) -> f64 {
    let pairs = blocks_of(&make()) as f64;
    let index = Index::new();
    COUNT.store(true, Ordering::Relaxed);
    let before = BYTES.load(Ordering::Relaxed);
    index.apply(make());
    let after = BYTES.load(Ordering::Relaxed);
    (after - before) as f64 / pairs
}

fn heap_returned() -> f64 {
    let index = Index::new();
    COUNT.store(true, Ordering::Relaxed);
    let before = BYTES.load(Ordering::Relaxed);
    index.apply(unique());
    let full = BYTES.load(Ordering::Relaxed);
    {
        let events = unique();
        let gone = removals(&events, 1, true);
        drop(events);
        index.apply(gone);
    }
    // Its own maintenance, as often as it wants.
    while index.tree.try_schedule_cleanup() {
        index.tree.run_cleanup_task();
    }
    let empty = BYTES.load(Ordering::Relaxed);
    100.0 * (full - empty) as f64 / (full - before) as f64
}

fn main() {
    let shape = std::env::args().nth(1).unwrap_or_default();
    let value = match shape.as_str() {
        "match-4-agree" => match_time(full_path(4, true), false),
        "match-64-agree" => match_time(full_path(64, true), false),
        "match-512-agree" => match_time(full_path(512, true), false),
        "scores-64-agree" => match_time(full_path(64, true), true),
        "match-allocations" => match_allocations(),
        "path-16" => match_time(branched_path(16), false),
        "path-512" => match_time(branched_path(512), false),
        "match-under-load" => match_under_load(),
        "match-random" => match_random(),
        "apply-unique" => Index::new().rate(unique()),
        "apply-shared-agree" => Index::new().rate(shared(true)),
        "remove-1" => remove_rate(unique(), 1, false),
        "remove-1-random" => remove_rate(unique(), 1, true),
        "remove-32" => remove_rate(unique(), 32, false),
        "bytes-unshared" => pair_bytes(unique),
        "bytes-shared-agree" => pair_bytes(|| shared(true)),
        "heap-returned" => heap_returned(),
        _ => {
            eprintln!("peer-dynamo: {shape:?} is no shape of bench/parts/index.go");
            std::process::exit(2);
        }
    };
    println!("{value}");
}
