/* SPDX-License-Identifier: Apache-2.0
 *
 * libkvroute_publisher: tell kvroute what is in the KV cache of an engine.
 *
 * The functions may be called by any number of threads. Events of a rank are
 * published in the order of the calls. None waits for the bus: events leave within
 * 5 ms, and while the bus is away a bounded number waits; what does not fit is lost,
 * and routers see that it is. Lists and strings are copied during the call.
 *
 * A function that fails returns -1 (kvroute_publisher_open: 0) and, if error is not
 * NULL, sets *error to a text that is freed with kvroute_free. Otherwise *error is
 * left as it is.
 *
 * A process must not fork while a publisher is open: the child's does not work.
 */
#ifndef KVROUTE_PUBLISHER_H
#define KVROUTE_PUBLISHER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a publisher and returns its handle. config is a JSON object:
 *
 *   kv_block_size          tokens in a block; required
 *   worker_id, name        number of the worker, or a name to make one of; one is required
 *   nats_url               default "nats://127.0.0.1:4222"; tls:// encrypts; file:PATH reads it from a file
 *   nats_creds, nats_nkey  file with credentials, or with the seed of an nkey
 *   nats_ca, nats_cert, nats_key   PEM files: whom to trust, what to show, and its key
 *   nats_inbox_prefix      subject that answers come below; default "_INBOX"
 *   nats_replicas          servers of a cluster that keep what is created; default 1
 *   namespace, component, endpoint   default "kvroute", "workers", "generate"
 *   enable_local_indexer   true answers routers that missed events
 *   durable                true publishes into a stream that keeps events
 *   set_like               true: one removal removes all copies of a block
 *   image_token_id         the model's token for an image
 *   address                "ip:port" of the OpenAI endpoint; registers the worker and
 *                          keeps it registered. Without it somebody else does that
 *   models, lora           names of the model (required with address) and its adapters
 *   role, dp_start, dp_size, total_kv_blocks, max_num_seqs, max_num_batched_tokens,
 *   model_card, engine     as in the registry, see docs/protocol.md
 *   log_level              "debug", "info", "warn" or "error" to standard error;
 *                          default nothing
 */
uint64_t kvroute_publisher_open(const char *config, char **error);

/* Blocks were stored: consecutive ones of one sequence. token_ids are those of all
 * blocks, num_block_tokens and block_hashes have an element for each block; from the
 * first block on that has another size than kv_block_size they are left out.
 * parent_hash is the block before them, NULL at the beginning of a sequence.
 * lora_name and cache_salt may be NULL; behind a parent without both, the parent's
 * count. Returns the number of published blocks: 0 if the parent is not known and
 * there is neither lora_name nor cache_salt. */
int64_t kvroute_publisher_stored(uint64_t publisher, uint32_t dp_rank,
                                 const uint32_t *token_ids, size_t tokens,
                                 const uint32_t *num_block_tokens,
                                 const uint64_t *block_hashes, size_t blocks,
                                 const uint64_t *parent_hash,
                                 const char *lora_name, const char *cache_salt,
                                 char **error);

/* Blocks were removed. */
int kvroute_publisher_removed(uint64_t publisher, uint32_t dp_rank,
                              const uint64_t *block_hashes, size_t blocks,
                              char **error);

/* The rank's cache is empty. */
int kvroute_publisher_cleared(uint64_t publisher, uint32_t dp_rank, char **error);

/* How busy the worker is, for its heartbeats: requests, blocks, and the share of
 * the cache in use from 0 to 1. */
int kvroute_publisher_load(uint64_t publisher, uint32_t running, uint32_t waiting,
                           uint32_t kv_used_blocks, double kv_utilization,
                           char **error);

/* Publishes what is pending, takes the registration back and ends. The handle is of
 * no more use. */
int kvroute_publisher_close(uint64_t publisher, char **error);

void kvroute_free(char *text);

#ifdef __cplusplus
}
#endif
#endif
