/* SPDX-License-Identifier: Apache-2.0
 *
 * libkvroute_publisher publishes the events of an engine's KV cache to kvroute.
 *
 * The functions may be called by any number of threads. Events of a rank are
 * published in the order of the calls, within 5 ms. No function waits for NATS. While
 * NATS is unavailable, a limited number of events waits; further events are lost, and
 * routers notice the gap. Lists and strings are copied during the call.
 *
 * A function that fails returns -1 (kvroute_publisher_open: 0) and, if error is not
 * NULL, sets *error to a text, which the caller frees with kvroute_free. Otherwise
 * *error is unchanged.
 *
 * A process must not fork while a publisher is open: it does not work in the child.
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
 *   worker_id, name        number of the worker, or a name that gives the number; one is required
 *   nats_url               default "nats://127.0.0.1:4222"; tls:// encrypts; file:PATH reads it from a file
 *   nats_creds, nats_nkey  file with credentials, or with the seed of an nkey
 *   nats_ca, nats_cert, nats_key   PEM files: authorities of NATS's certificate; own certificate and key
 *   nats_inbox_prefix      beginning of the subjects of NATS's answers; default "_INBOX"
 *   nats_replicas          servers that keep the created streams and buckets; default 1
 *   namespace, component, endpoint   default "kvroute", "workers", "generate"
 *   enable_local_indexer   true answers routers that missed events
 *   durable                true publishes into a stream that keeps events
 *   set_like               true: one removal removes all copies of a block
 *   image_token_id         the model's token for an image
 *   address                "ip:port" of the OpenAI endpoint; registers the worker and
 *                          keeps it registered. Without it the worker is not registered
 *   models, lora           names of the model (required with address) and its adapters
 *   role, bootstrap, dp_start, dp_size, total_kv_blocks, max_num_seqs,
 *   max_num_batched_tokens, model_card, engine   as in the registry, see docs/workers.md
 *   log_level              "debug", "info", "warn" or "error" to standard error;
 *                          default nothing
 */
uint64_t kvroute_publisher_open(const char *config, char **error);

/* Publishes that consecutive blocks of one sequence were stored. token_ids are the tokens
 * of all blocks; num_block_tokens and block_hashes have an element for each block. The
 * first block of another size than kv_block_size, and all blocks after it, are left out.
 * parent_hash is the block before the first one; NULL at the beginning of a sequence.
 * lora_name and cache_salt may be NULL; after a parent, without both, those of the parent
 * count. Returns the number of published blocks: 0 if the parent is unknown and there is
 * neither lora_name nor cache_salt. */
int64_t kvroute_publisher_stored(uint64_t publisher, uint32_t dp_rank,
                                 const uint32_t *token_ids, size_t tokens,
                                 const uint32_t *num_block_tokens,
                                 const uint64_t *block_hashes, size_t blocks,
                                 const uint64_t *parent_hash,
                                 const char *lora_name, const char *cache_salt,
                                 char **error);

/* Publishes that blocks were removed. */
int kvroute_publisher_removed(uint64_t publisher, uint32_t dp_rank,
                              const uint64_t *block_hashes, size_t blocks,
                              char **error);

/* Publishes that the rank's cache is empty. */
int kvroute_publisher_cleared(uint64_t publisher, uint32_t dp_rank, char **error);

/* Sets the load that the worker's heartbeats contain: requests, blocks, and the used
 * share of the cache from 0 to 1. */
int kvroute_publisher_load(uint64_t publisher, uint32_t running, uint32_t waiting,
                           uint32_t kv_used_blocks, double kv_utilization,
                           char **error);

/* Publishes the waiting events, removes the registration and closes the publisher. The
 * handle is invalid afterwards. */
int kvroute_publisher_close(uint64_t publisher, char **error);

void kvroute_free(char *text);

#ifdef __cplusplus
}
#endif
#endif
