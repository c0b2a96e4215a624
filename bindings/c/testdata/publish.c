/* SPDX-License-Identifier: Apache-2.0
 *
 * Publishes the blocks of a prompt as it is told to on standard input, a word a
 * line: stored, removed (the last block), cleared, wrong, quit. Each is answered by
 * "ok" and a number, or "error" and a text. Arguments: configuration, block size,
 * file with the token ids, one a line.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvroute_publisher.h"

int main(int argc, char **argv) {
	char *error = NULL;
	if (argc != 4) return 2;
	uint64_t publisher = kvroute_publisher_open(argv[1], &error);
	if (publisher == 0) {
		printf("error %s\n", error);
		kvroute_free(error);
		return 1;
	}
	size_t size = strtoul(argv[2], NULL, 10), tokens = 0;
	static uint32_t ids[1 << 16], sizes[1 << 12];
	static uint64_t hashes[1 << 12];
	FILE *file = fopen(argv[3], "r");
	if (file == NULL) return 2;
	while (tokens < 1 << 16 && fscanf(file, "%u", &ids[tokens]) == 1) tokens++;
	fclose(file);
	size_t blocks = tokens / size;
	for (size_t i = 0; i < blocks; i++) {
		sizes[i] = (uint32_t)size;
		hashes[i] = UINT64_MAX - i;
	}
	char line[64];
	printf("ok %zu\n", blocks);
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) != NULL) {
		int64_t status = -1;
		line[strcspn(line, "\n")] = 0;
		if (strcmp(line, "stored") == 0)
			status = kvroute_publisher_stored(publisher, 0, ids, blocks * size, sizes, hashes, blocks, NULL, NULL, NULL, &error);
		else if (strcmp(line, "removed") == 0)
			status = kvroute_publisher_removed(publisher, 0, &hashes[blocks - 1], 1, &error);
		else if (strcmp(line, "cleared") == 0)
			status = kvroute_publisher_cleared(publisher, 0, &error);
		else if (strcmp(line, "wrong") == 0)
			status = kvroute_publisher_stored(publisher, 0, NULL, 5, sizes, hashes, blocks, NULL, NULL, NULL, &error);
		else if (strcmp(line, "quit") == 0) {
			if ((status = kvroute_publisher_load(publisher, 1, 2, 3, 0.5, &error)) == 0 &&
			    (status = kvroute_publisher_close(publisher, &error)) == 0 &&
			    kvroute_publisher_close(publisher, NULL) == 0)
				status = 99; /* closed twice */
		}
		if (status < 0) {
			printf("error %s\n", error != NULL ? error : "unknown");
			kvroute_free(error);
			error = NULL;
		} else
			printf("ok %lld\n", (long long)status);
		fflush(stdout);
		if (strcmp(line, "quit") == 0) return 0;
	}
	return 3;
}
