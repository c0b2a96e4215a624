// SPDX-License-Identifier: Apache-2.0

//! Measures the rate at which the index of Dynamo's router applies events of caches, for `make bench-index`.
//!
//! The standard input has two lists of events. The program applies the first list, then the second one. It prints the
//! rate of each list in millions of blocks a second. If a worker removes a block, Dynamo's index also drops the worker's
//! blocks behind it; the later removal of such a block is an error, which counts as a removal here. All numbers of a
//! list are u64, little endian:
//!
//!   list   number of events, events
//!   event  worker, kind (0: stored, 1: removed), parent (0: none), number of blocks, blocks
//!   block  engine's hash, local hash

use dynamo_kv_router::protocols::*;
use dynamo_kv_router::RadixTree;
use std::io::Read;
use std::time::Instant;

fn main() {
    let mut text = Vec::new();
    std::io::stdin().read_to_end(&mut text).expect("read the events");
    let mut numbers = text.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap()));
    let lists = [list(&mut numbers), list(&mut numbers)];
    let mut index = RadixTree::new();
    for (events, blocks) in lists {
        let start = Instant::now();
        for event in events {
            let _ = index.apply_event(event); // an error: the block was dropped before
        }
        println!("{}", blocks as f64 / start.elapsed().as_secs_f64() / 1e6);
    }
    assert_eq!(index.current_size(), 0, "blocks are left after all were removed");
}

fn list(numbers: &mut impl Iterator<Item = u64>) -> (Vec<RouterEvent>, usize) {
    let mut next = || numbers.next().expect("a number");
    let mut total = 0;
    let events = (0..next())
        .map(|event_id| {
            let (worker, kind, parent, n) = (next(), next(), next(), next());
            total += n as usize;
            let blocks: Vec<(u64, u64)> = (0..n).map(|_| (next(), next())).collect();
            let data = if kind == 0 {
                KvCacheEventData::Stored(KvCacheStoreData {
                    parent_hash: (parent != 0).then_some(ExternalSequenceBlockHash(parent)),
                    start_position: None,
                    blocks: blocks
                        .iter()
                        .map(|&(hash, local)| KvCacheStoredBlockData {
                            block_hash: ExternalSequenceBlockHash(hash),
                            tokens_hash: LocalBlockHash(local),
                            mm_extra_info: None,
                        })
                        .collect(),
                })
            } else {
                KvCacheEventData::Removed(KvCacheRemoveData {
                    block_hashes: blocks.iter().map(|&(hash, _)| ExternalSequenceBlockHash(hash)).collect(),
                })
            };
            RouterEvent::new(worker, KvCacheEvent { event_id, data, dp_rank: 0 })
        })
        .collect();
    (events, total)
}
