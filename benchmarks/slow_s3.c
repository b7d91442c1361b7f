/* An S3 server in memory whose every connection has a fixed rate and latency, in C.
 *
 * It does what tests/kits/paced_s3.py does, for a third of a processor-second a GB, so that on a
 * small machine the client under test has the processors. Both take the same settings, as JSON:
 *
 *     slow_s3 '{"port": 9000, "bytes_per_s": 10e6, "latency_s": 0.02, "ready_bytes": 1e9}'
 *
 * It listens on 127.0.0.1 alone, checks no signatures and no checksums, and knows path-style
 * addresses, PUT with If-None-Match, copies, GET with a range, HEAD, DELETE, multipart uploads,
 * ListObjectsV2 and the deletion of many objects, with bodies as they are or framed
 * (aws-chunked). Of the settings it ignores "hold" and "file".
 *
 * Requests of its own, neither paced nor counted: GET /-/counts returns what was served as JSON,
 * POST /-/counts begins the counts again, PUT /-/pace takes other settings (rates hold for
 * connections that come later), DELETE /-/objects empties all buckets.
 *
 * Bounds: bodies take at most "ready_bytes" (256 MiB at least), beyond which a PUT is answered
 * 507; there are at most OBJECTS_MOST objects and as many uploads, PARTS_MOST parts of an upload,
 * CONNECTIONS_MOST connections, and HEAD_MOST bytes of a request's head.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
  BLOCK = 256 << 10, /* bytes of a block of memory, and of a step of a paced body */
  HEAD_MOST = 64 << 10,
  PATH_MOST = 4096,
  TEXT_MOST = 16 << 20, /* bytes of a request's XML */
  OBJECTS_MOST = 1 << 18,
  PARTS_MOST = 10000,
  CONNECTIONS_MOST = 1024,
  STACK = 256 << 10,
};
static const size_t ARENA_LEAST = 256u << 20;
#define DATE "Thu, 01 Jan 2026 00:00:00 GMT"
#define TIME "2026-01-01T00:00:00.000Z"
#define SPACE " xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\""
#define XML "Content-Type: application/xml\r\n"

/* --- settings and counts ------------------------------------------------------------------- */

typedef struct {
  double bytes_per_s, latency_s, slow_every, slow_s, busy_above, busy_rate;
} settings;

static const char *const METHODS[] = {"GET", "PUT", "HEAD", "POST", "DELETE"};
enum { GET, PUT, HEAD, POST, DELETE, N_METHODS };

static const char *const KINDS[] = {
    "get",   "put",  "head",       "post",        "delete",      "part",         "create", "complete",
    "abort", "list", "bucket put", "bucket head", "bucket post", "bucket delete"};
enum {
  K_PART = N_METHODS,
  K_CREATE,
  K_COMPLETE,
  K_ABORT,
  K_LIST,
  K_BUCKET_PUT,
  K_BUCKET_HEAD,
  K_BUCKET_POST,
  K_BUCKET_DELETE,
  N_KINDS
};

typedef struct {
  long methods[N_METHODS], kinds[N_KINDS], busy, slow, connections, at_once, serial;
  unsigned long long received, sent;
  double processor_s; /* of this process, when the counts began */
} counts;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below */
static settings pace;
static counts served;
static long on_the_way, connections_open;
static double credit, credited;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void pause_s(double seconds) {
  if (seconds <= 0) return;
  struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  while (nanosleep(&t, &t) && errno == EINTR) continue;
}

static double processor_s(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  double seconds = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec);
  return seconds + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* Returns the number behind a name of flat JSON, or 0. */
static double number_of(const char *json, const char *name) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\"", name);
  const char *at = strstr(json, quoted);
  if (!at) return 0;
  at += strlen(quoted);
  at += strspn(at, " :");
  return strtod(at, NULL);
}

/* Begins the counts again; under the lock. */
static void begin_counts(void) {
  long serial = served.serial + 1;
  served = (counts){.serial = serial, .processor_s = processor_s()};
  credit = pace.busy_rate;
  credited = now_s();
}

static void set_pace(const char *json) {
  pthread_mutex_lock(&lock);
  pace = (settings){.bytes_per_s = number_of(json, "bytes_per_s"),
                    .latency_s = number_of(json, "latency_s"),
                    .slow_every = number_of(json, "slow_every"),
                    .slow_s = number_of(json, "slow_s"),
                    .busy_above = number_of(json, "busy_above"),
                    .busy_rate = number_of(json, "busy_rate")};
  begin_counts();
  pthread_mutex_unlock(&lock);
}

/* --- memory of bodies ----------------------------------------------------------------------- */

static char *arena;
static size_t blocks_most, blocks_used, *blocks_free, blocks_free_count;

/* Blocks of one body; each body belongs to one part. */
typedef struct {
  size_t size, count, room;
  char **blocks;
} body;

/* Takes one block more for a body; returns whether there was one. */
static bool grow(body *b) {
  if (b->count == b->room) {
    size_t room = b->room ? 2 * b->room : 4;
    char **more = realloc(b->blocks, room * sizeof *more);
    if (!more) return false;
    b->blocks = more;
    b->room = room;
  }
  pthread_mutex_lock(&lock);
  bool found = blocks_free_count || blocks_used < blocks_most;
  size_t index = 0;
  if (found) index = blocks_free_count ? blocks_free[--blocks_free_count] : blocks_used++;
  pthread_mutex_unlock(&lock);
  if (found) b->blocks[b->count++] = arena + index * BLOCK;
  return found;
}

static void give_back(body *b) {
  pthread_mutex_lock(&lock);
  for (size_t i = b->count; i--;) blocks_free[blocks_free_count++] = (size_t)(b->blocks[i] - arena) / BLOCK;
  pthread_mutex_unlock(&lock);
  free(b->blocks);
  *b = (body){0};
}

static bool make_arena(size_t bytes) {
  if (bytes < ARENA_LEAST) bytes = ARENA_LEAST;
  blocks_most = bytes / BLOCK;
  blocks_free = malloc(blocks_most * sizeof *blocks_free);
  int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  arena = mmap(NULL, blocks_most * BLOCK, PROT_READ | PROT_WRITE, kind, -1, 0);
  return blocks_free && arena != MAP_FAILED;
}

/* Takes the memory that bodies will need: the first write to a page costs more than its bytes. */
static void make_ready(size_t bytes) {
  if (bytes > blocks_most * BLOCK) bytes = blocks_most * BLOCK;
  madvise(arena, blocks_most * BLOCK, MADV_HUGEPAGE);
  for (size_t at = 0; at < bytes; at += 4096) arena[at] = 0;
}

/* --- objects and uploads, under the lock ---------------------------------------------------- */

typedef struct part {
  int number;
  body data;
  struct part *next;
} part;

typedef struct {
  char *path; /* bucket/key */
  part *parts;
  size_t size;
  char tag[48];
  int users; /* the table, and every answer that sends it */
} object;

typedef struct upload {
  char *path;
  char id[24];
  part *parts;
  int count;
  struct upload *next;
} upload;

static object **objects;
static size_t objects_count, objects_room;
static upload *uploads;
static long uploads_count, names_given;

static void free_parts(part *p) {
  while (p) {
    part *next = p->next;
    give_back(&p->data);
    free(p);
    p = next;
  }
}

/* Lets an object go; without the lock. */
static void release(object *o) {
  if (!o) return;
  pthread_mutex_lock(&lock);
  bool last = --o->users == 0;
  pthread_mutex_unlock(&lock);
  if (!last) return;
  free_parts(o->parts);
  free(o->path);
  free(o);
}

/* Returns the place of a path in the table, or that of the next one. */
static size_t place_of(const char *path, bool *found) {
  size_t low = 0, high = objects_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (strcmp(objects[middle]->path, path) < 0)
      low = middle + 1;
    else
      high = middle;
  }
  *found = low < objects_count && !strcmp(objects[low]->path, path);
  return low;
}

/* Takes an object out of the table and returns it, for release(); or NULL. */
static object *taken_out(const char *path) {
  bool found;
  size_t at = place_of(path, &found);
  if (!found) return NULL;
  object *o = objects[at];
  memmove(objects + at, objects + at + 1, (--objects_count - at) * sizeof *objects);
  return o;
}

/* Puts an object into the table; `old` is the one that it replaces, for release(). */
static bool put_in(object *o, object **old) {
  *old = taken_out(o->path);
  if (objects_count == objects_room) {
    size_t room = objects_room ? 2 * objects_room : 256;
    object **more = room <= OBJECTS_MOST ? realloc(objects, room * sizeof *more) : NULL;
    if (!more) return false;
    objects = more;
    objects_room = room;
  }
  bool found;
  size_t at = place_of(o->path, &found);
  memmove(objects + at + 1, objects + at, (objects_count++ - at) * sizeof *objects);
  objects[at] = o;
  return true;
}

static bool is_there(const char *path) {
  bool found;
  place_of(path, &found);
  return found;
}

static upload **upload_of(const char *id) {
  upload **at = &uploads;
  while (*at && strcmp((*at)->id, id)) at = &(*at)->next;
  return at;
}

static void free_upload(upload *u) {
  if (!u) return;
  free_parts(u->parts);
  free(u->path);
  free(u);
}

static void empty_all(void) {
  pthread_mutex_lock(&lock);
  object **all = objects;
  size_t count = objects_count;
  upload *left = uploads;
  objects = NULL;
  objects_count = objects_room = 0;
  uploads = NULL;
  uploads_count = 0;
  pthread_mutex_unlock(&lock);
  for (size_t i = 0; i < count; i++) release(all[i]);
  free(all);
  while (left) {
    upload *next = left->next;
    free_upload(left);
    left = next;
  }
}

/* --- one connection --------------------------------------------------------------------------- */

typedef struct {
  int fd;
  size_t begin, end; /* of what is in the buffer */
  long counted;      /* serial of the counts that have this connection */
  double rate;
  char buffer[HEAD_MOST];
} line;

typedef struct {
  int method;
  bool framed, expects, if_absent, closes;
  unsigned long long length;
  char range[64], if_match[64];
  char path[PATH_MOST]; /* bucket/key */
  char source[PATH_MOST]; /* likewise, of the object to copy; or empty */
  const char *key;
  char *query;
  body data;
  bool full; /* there was no memory for the body */
} request;

static bool send_all(line *c, const char *data, size_t size, int flags) {
  while (size) {
    ssize_t sent = send(c->fd, data, size, flags | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    data += sent;
    size -= (size_t)sent;
  }
  return true;
}

static bool more(line *c) {
  if (c->begin) {
    memmove(c->buffer, c->buffer + c->begin, c->end - c->begin);
    c->end -= c->begin;
    c->begin = 0;
  }
  if (c->end == sizeof c->buffer) return false;
  ssize_t got;
  do got = recv(c->fd, c->buffer + c->end, sizeof c->buffer - c->end, 0);
  while (got < 0 && errno == EINTR);
  if (got <= 0) return false;
  c->end += (size_t)got;
  return true;
}

/* Returns what comes before a mark, ended by a zero in place of it; NULL if the client has left. */
static char *until(line *c, const char *mark) {
  size_t size = strlen(mark);
  char *found;
  while (!(found = memmem(c->buffer + c->begin, c->end - c->begin, mark, size)))
    if (!more(c)) return NULL;
  char *text = c->buffer + c->begin;
  *found = 0;
  c->begin = (size_t)(found - c->buffer) + size;
  return text;
}

static bool fill(line *c, char *to, size_t size) {
  size_t ready = c->end - c->begin < size ? c->end - c->begin : size;
  memcpy(to, c->buffer + c->begin, ready);
  c->begin += ready;
  while (ready < size) {
    ssize_t got = recv(c->fd, to + ready, size - ready, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    ready += (size_t)got;
  }
  return true;
}

/* Reads bytes behind the end of a body, no faster than the rate; drops them without memory. */
static bool take(line *c, request *r, unsigned long long size, double began) {
  static char dropped[BLOCK]; /* read by nobody */
  body *b = &r->data;
  while (size) {
    size_t used = b->size % BLOCK;
    if (!used && !r->full && !grow(b)) r->full = true;
    size_t step = size < BLOCK - used ? (size_t)size : BLOCK - used;
    if (!fill(c, r->full ? dropped : b->blocks[b->count - 1] + used, step)) return false;
    b->size += step;
    size -= step;
    if (c->rate > 0) pause_s(began + (double)b->size / c->rate - now_s());
  }
  return true;
}

static bool receive(line *c, request *r) {
  double began = now_s();
  if (!r->framed) {
    if (!take(c, r, r->length, began)) return false;
  } else {
    for (;;) {
      char *head = until(c, "\r\n");
      if (!head) return false;
      unsigned long long size = strtoull(head, NULL, 16);
      if (!size) break;
      if (!take(c, r, size, began) || !until(c, "\r\n")) return false;
    }
    for (char *trailer; (trailer = until(c, "\r\n")) && *trailer;) continue;
  }
  pthread_mutex_lock(&lock);
  served.received += r->data.size;
  pthread_mutex_unlock(&lock);
  return true;
}

/* Sends a range of an object, no faster than the rate. */
static bool send_object(line *c, const object *o, size_t begin, size_t end) {
  double began = now_s();
  size_t at = 0, sent = 0;
  for (const part *p = o->parts; p && at < end; at += p->data.size, p = p->next) {
    size_t low = begin > at ? begin - at : 0;
    size_t high = end - at < p->data.size ? end - at : p->data.size;
    while (low < high) {
      size_t within = low % BLOCK, step = BLOCK - within < high - low ? BLOCK - within : high - low;
      pthread_mutex_lock(&lock);
      served.sent += step; /* before: who has received it may ask at once */
      pthread_mutex_unlock(&lock);
      if (!send_all(c, p->data.blocks[low / BLOCK] + within, step, 0)) return false;
      low += step;
      sent += step;
      if (c->rate > 0) pause_s(began + (double)sent / c->rate - now_s());
    }
  }
  return true;
}

/* Sends the head of an answer and a text; `size` is that of the body that the head tells. */
static bool answer(line *c, const request *r, int status, const char *headers, const char *text,
                   size_t size) {
  char head[2048], told[64] = "";
  if (status != 204) snprintf(told, sizeof told, "Content-Length: %zu\r\n", size);
  int length = snprintf(head, sizeof head,
                        "HTTP/1.1 %d X\r\nDate: " DATE "\r\nx-amz-request-id: 1\r\n%s%s\r\n",
                        status, told, headers);
  if (length < 0 || (size_t)length >= sizeof head) return false;
  bool body_follows = r->method != HEAD && size;
  if (!send_all(c, head, (size_t)length, body_follows ? MSG_MORE : 0)) return false;
  return !text || !body_follows || send_all(c, text, size, 0);
}

static bool plain(line *c, const request *r, int status, const char *headers) {
  return answer(c, r, status, headers, NULL, 0);
}

static bool fault(line *c, const request *r, int status, const char *code) {
  char text[256];
  int size = snprintf(text, sizeof text, "<Error><Code>%s</Code><Message>%s</Message></Error>", code, code);
  return answer(c, r, status, XML, text, (size_t)size);
}

/* --- texts -------------------------------------------------------------------------------------- */

static void unquote(char *text, bool plus) {
  char *to = text;
  for (; *text; text++) {
    if (*text == '%' && isxdigit((unsigned char)text[1]) && isxdigit((unsigned char)text[2])) {
      char hex[3] = {text[1], text[2], 0};
      *to++ = (char)strtol(hex, NULL, 16);
      text += 2;
    } else {
      *to++ = plus && *text == '+' ? ' ' : *text;
    }
  }
  *to = 0;
}

/* Copies the value of a query's name; returns whether the query has it. */
static bool asked(const request *r, const char *name, char *to, size_t room) {
  size_t size = strlen(name);
  to[0] = 0;
  for (const char *at = r->query; at && *at;) {
    size_t length = strcspn(at, "&");
    if (length >= size && !strncmp(at, name, size) && (length == size || at[size] == '=')) {
      if (length > size) snprintf(to, room, "%.*s", (int)(length - size - 1), at + size + 1);
      unquote(to, true);
      return true;
    }
    at += length;
    if (*at) at++;
  }
  return false;
}

static void escaped(FILE *to, const char *text) {
  for (; *text; text++) {
    if (*text == '&')
      fputs("&amp;", to);
    else if (*text == '<')
      fputs("&lt;", to);
    else if (*text == '>')
      fputs("&gt;", to);
    else
      fputc(*text, to);
  }
}

static void unescape(char *text) {
  static const char *const names[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&apos;"};
  static const char signs[] = "&<>\"'";
  char *to = text;
  while (*text) {
    size_t i = 0;
    while (i < 5 && strncmp(text, names[i], strlen(names[i]))) i++;
    *to++ = i < 5 ? signs[i] : *text;
    text += i < 5 ? strlen(names[i]) : 1;
  }
  *to = 0;
}

/* Returns a small body as text, to be freed; NULL if it is too large. */
static char *text_of(const body *b) {
  char *text = b->size <= TEXT_MOST ? malloc(b->size + 1) : NULL;
  if (!text) return NULL;
  for (size_t at = 0; at < b->size; at += BLOCK)
    memcpy(text + at, b->blocks[at / BLOCK], b->size - at < BLOCK ? b->size - at : BLOCK);
  text[b->size] = 0;
  return text;
}

/* Copies what is in the next element of a name; returns where to look on, or NULL. */
static const char *element(const char *at, const char *name, char *to, size_t room) {
  char opens[32], closes[32];
  snprintf(opens, sizeof opens, "<%s>", name);
  snprintf(closes, sizeof closes, "</%s>", name);
  const char *from = strstr(at, opens), *end = from ? strstr(from, closes) : NULL;
  if (!end) return NULL;
  from += strlen(opens);
  snprintf(to, room, "%.*s", (int)(end - from), from);
  unescape(to);
  return end;
}

/* --- operations ----------------------------------------------------------------------------------- */

static object *new_object(const char *path, part *parts) {
  object *o = calloc(1, sizeof *o);
  if (!o || !(o->path = strdup(path))) abort();
  o->parts = parts;
  o->users = 1;
  for (const part *p = parts; p; p = p->next) o->size += p->data.size;
  return o;
}

static part *new_part(request *r, int number) {
  part *p = calloc(1, sizeof *p);
  if (!p) abort();
  p->number = number;
  p->data = r->data;
  r->data = (body){0};
  return p;
}

static bool put_part(line *c, request *r, const char *id) {
  char text[32], headers[64];
  asked(r, "partNumber", text, sizeof text);
  part *p = new_part(r, atoi(text)), *old = NULL;
  bool fits = p->number >= 1 && p->number <= PARTS_MOST;
  pthread_mutex_lock(&lock);
  upload *u = *upload_of(id);
  if (u && fits) {
    part **at = &u->parts;
    while (*at && (*at)->number < p->number) at = &(*at)->next;
    if (*at && (*at)->number == p->number) {
      old = *at;
      p->next = old->next;
      old->next = NULL;
    } else {
      p->next = *at;
    }
    *at = p;
  }
  pthread_mutex_unlock(&lock);
  free_parts(u && fits ? old : p);
  if (!u) return fault(c, r, 404, "NoSuchUpload");
  if (!fits) return fault(c, r, 400, "InvalidArgument");
  snprintf(headers, sizeof headers, "ETag: \"%032d\"\r\n", p->number);
  return plain(c, r, 200, headers);
}

/* Returns an object that the caller releases, or NULL. */
static object *held(const char *path) {
  bool found;
  pthread_mutex_lock(&lock);
  size_t place = place_of(path, &found);
  object *o = found ? objects[place] : NULL;
  if (o) o->users++;
  pthread_mutex_unlock(&lock);
  return o;
}

/* Copies the bytes of an object into the body of the request; without memory that is full. */
static void copy_into(request *r, const object *o) {
  body *b = &r->data;
  for (const part *p = o->parts; p; p = p->next) {
    for (size_t at = 0, step; at < p->data.size && !r->full; at += step, b->size += step) {
      size_t from = at % BLOCK, to = b->size % BLOCK, left = p->data.size - at;
      if (!to && !grow(b)) r->full = true;
      step = BLOCK - (from > to ? from : to);
      if (step > left) step = left;
      if (!r->full) memcpy(b->blocks[b->count - 1] + to, p->data.blocks[at / BLOCK] + from, step);
    }
  }
}

static bool put(line *c, request *r) {
  char id[64], headers[96], text[256] = "";
  if (r->source[0]) {
    object *source = held(r->source);
    if (!source) return fault(c, r, 404, "NoSuchKey");
    copy_into(r, source);
    release(source);
    if (r->full) return fault(c, r, 507, "InsufficientStorage");
  }
  if (asked(r, "uploadId", id, sizeof id)) return put_part(c, r, id);
  object *o = new_object(r->path, new_part(r, 1)), *old = NULL;
  pthread_mutex_lock(&lock);
  bool taken = r->if_absent && is_there(r->path);
  snprintf(o->tag, sizeof o->tag, "\"%032lx\"", ++names_given);
  bool kept = !taken && put_in(o, &old);
  snprintf(headers, sizeof headers, "ETag: %s\r\n", o->tag);
  if (r->source[0])
    snprintf(text, sizeof text,
             "<CopyObjectResult><LastModified>" TIME "</LastModified><ETag>%s</ETag>"
             "</CopyObjectResult>",
             o->tag);
  pthread_mutex_unlock(&lock);
  release(old);
  if (!kept) release(o);
  if (taken) return fault(c, r, 412, "PreconditionFailed");
  return kept ? answer(c, r, 200, headers, text, strlen(text))
              : fault(c, r, 507, "InsufficientStorage");
}

static bool begin_upload(line *c, request *r) {
  upload *u = calloc(1, sizeof *u);
  if (!u || !(u->path = strdup(r->path))) abort();
  pthread_mutex_lock(&lock);
  bool fits = uploads_count < OBJECTS_MOST;
  snprintf(u->id, sizeof u->id, "u%ld", ++names_given);
  if (fits) {
    u->next = uploads;
    uploads = u;
    uploads_count++;
  }
  char text[256];
  static const char form[] = "<InitiateMultipartUploadResult" SPACE "><UploadId>%s</UploadId>"
                             "</InitiateMultipartUploadResult>";
  int size = snprintf(text, sizeof text, form, u->id);
  pthread_mutex_unlock(&lock);
  if (fits) return answer(c, r, 200, XML, text, (size_t)size);
  free_upload(u);
  return fault(c, r, 507, "InsufficientStorage");
}

/* Takes the parts that the XML names out of an upload, in their order; NULL if one is missing. */
static part *chosen(upload *u, const char *xml) {
  part *first = NULL, **end = &first, **from = &u->parts;
  char number[32];
  while ((xml = element(xml, "PartNumber", number, sizeof number))) {
    while (*from && (*from)->number < atoi(number)) from = &(*from)->next;
    if (!*from || (*from)->number != atoi(number)) break;
    part *p = *from;
    *from = p->next;
    *end = p;
    end = &p->next;
    *end = NULL;
  }
  if (!xml) return first;
  while (first) { /* back to where they were */
    part *p = first, **at = &u->parts;
    first = p->next;
    while (*at && (*at)->number < p->number) at = &(*at)->next;
    p->next = *at;
    *at = p;
  }
  return NULL;
}

static bool complete(line *c, request *r, const char *id) {
  char *xml = text_of(&r->data), tag[48] = "";
  if (!xml) return fault(c, r, 400, "MalformedXML");
  object *old = NULL;
  part *parts = NULL;
  pthread_mutex_lock(&lock);
  upload **at = upload_of(id), *u = *at;
  bool taken = r->if_absent && is_there(r->path);
  if (u && !taken && (parts = chosen(u, xml))) {
    *at = u->next;
    uploads_count--;
    object *o = new_object(r->path, parts);
    snprintf(o->tag, sizeof o->tag, "\"%032lx-1\"", ++names_given);
    memcpy(tag, o->tag, sizeof tag);
    if (!put_in(o, &old)) abort();
  }
  pthread_mutex_unlock(&lock);
  free(xml);
  release(old);
  if (!u) return fault(c, r, 404, "NoSuchUpload");
  if (taken) return fault(c, r, 412, "PreconditionFailed");
  if (!parts) return fault(c, r, 400, "InvalidPart");
  free_upload(u);
  char text[256];
  static const char form[] = "<CompleteMultipartUploadResult" SPACE "><ETag>%s</ETag>"
                             "</CompleteMultipartUploadResult>";
  int size = snprintf(text, sizeof text, form, tag);
  return answer(c, r, 200, XML, text, (size_t)size);
}

static bool delete_one(line *c, request *r) {
  char id[64];
  if (asked(r, "uploadId", id, sizeof id)) {
    pthread_mutex_lock(&lock);
    upload **at = upload_of(id), *u = *at;
    if (u) {
      *at = u->next;
      uploads_count--;
    }
    pthread_mutex_unlock(&lock);
    free_upload(u);
  } else {
    pthread_mutex_lock(&lock);
    object *old = taken_out(r->path);
    pthread_mutex_unlock(&lock);
    release(old);
  }
  return plain(c, r, 204, "");
}

static bool delete_many(line *c, request *r) {
  char *xml = text_of(&r->data), key[PATH_MOST], path[2 * PATH_MOST];
  if (!xml) return fault(c, r, 400, "MalformedXML");
  int bucket = (int)strcspn(r->path, "/");
  for (const char *at = xml; (at = element(at, "Key", key, sizeof key));) {
    snprintf(path, sizeof path, "%.*s/%s", bucket, r->path, key);
    pthread_mutex_lock(&lock);
    object *old = taken_out(path);
    pthread_mutex_unlock(&lock);
    release(old);
  }
  free(xml);
  static const char text[] = "<DeleteResult" SPACE "></DeleteResult>";
  return answer(c, r, 200, XML, text, sizeof text - 1);
}

static bool get(line *c, request *r) {
  object *o = held(r->path);
  if (!o) return fault(c, r, 404, "NoSuchKey");
  size_t begin = 0, end = o->size;
  bool good = true, ranged = !strncmp(r->range, "bytes=", 6), fits = true;
  if (r->if_match[0] && strcmp(r->if_match, "*") && strcmp(r->if_match, o->tag)) {
    good = fault(c, r, 412, "PreconditionFailed");
    fits = false;
  } else if (ranged) {
    char *rest;
    unsigned long long first = strtoull(r->range + 6 + (r->range[6] == '-'), &rest, 10);
    if (r->range[6] == '-') {
      begin = first < o->size ? o->size - (size_t)first : 0;
    } else {
      begin = (size_t)first;
      if (*rest == '-' && isdigit((unsigned char)rest[1])) {
        unsigned long long last = strtoull(rest + 1, NULL, 10);
        if (last < o->size) end = (size_t)last + 1;
      }
    }
    if (begin >= o->size || begin >= end) {
      good = fault(c, r, 416, "InvalidRange");
      fits = false;
    }
  }
  if (fits) {
    char headers[512];
    char span[128] = "";
    if (ranged)
      snprintf(span, sizeof span, "Content-Range: bytes %zu-%zu/%zu\r\n", begin, end - 1, o->size);
    snprintf(headers, sizeof headers,
             "Last-Modified: " DATE "\r\nETag: %s\r\nAccept-Ranges: bytes\r\n"
             "Content-Type: binary/octet-stream\r\n%s",
             o->tag, span);
    good = answer(c, r, ranged ? 206 : 200, headers, NULL, end - begin);
    if (good && r->method == GET) good = send_object(c, o, begin, end);
  }
  release(o);
  return good;
}

/* Writes a page of a listing; under the lock. */
static void list_page(const request *r, FILE *out) {
  char prefix[PATH_MOST], cut[64], after[PATH_MOST], text[32], last[PATH_MOST] = "";
  size_t bucket = strcspn(r->path, "/");
  asked(r, "prefix", prefix, sizeof prefix);
  asked(r, "delimiter", cut, sizeof cut);
  if (!asked(r, "continuation-token", after, sizeof after)) asked(r, "start-after", after, sizeof after);
  long most = asked(r, "max-keys", text, sizeof text) ? atol(text) : 1000, count = 0;
  if (most < 0 || most > 1000) most = 1000;
  bool is_more = false;
  fprintf(out, "<Name>%.*s</Name><Prefix>", (int)bucket, r->path);
  escaped(out, prefix);
  fprintf(out, "</Prefix><MaxKeys>%ld</MaxKeys>", most);
  for (size_t i = 0; i < objects_count && !is_more; i++) {
    const object *o = objects[i];
    if (strncmp(o->path, r->path, bucket) || o->path[bucket] != '/') continue;
    const char *key = o->path + bucket + 1;
    if (strncmp(key, prefix, strlen(prefix))) continue;
    const char *mark = cut[0] ? strstr(key + strlen(prefix), cut) : NULL;
    char name[PATH_MOST];
    size_t length = mark ? (size_t)(mark - key) + strlen(cut) : strlen(key);
    snprintf(name, sizeof name, "%.*s", (int)length, key);
    if (strcmp(name, after) <= 0 || !strcmp(name, last)) continue;
    if (count == most) {
      is_more = true;
      break;
    }
    count++;
    snprintf(last, sizeof last, "%s", name);
    fputs(mark ? "<CommonPrefixes><Prefix>" : "<Contents><Key>", out);
    escaped(out, name);
    if (mark)
      fputs("</Prefix></CommonPrefixes>", out);
    else
      fprintf(out,
              "</Key><LastModified>" TIME "</LastModified><ETag>%s</ETag>"
              "<Size>%zu</Size><StorageClass>STANDARD</StorageClass></Contents>",
              o->tag, o->size);
  }
  fprintf(out, "<KeyCount>%ld</KeyCount><IsTruncated>%s</IsTruncated>", count,
          is_more ? "true" : "false");
  if (is_more) {
    fputs("<NextContinuationToken>", out);
    escaped(out, last);
    fputs("</NextContinuationToken>", out);
  }
}

static bool list(line *c, request *r) {
  char *text = NULL, ignored[8];
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (!out) return false;
  if (asked(r, "location", ignored, sizeof ignored)) {
    fputs("<LocationConstraint" SPACE "></LocationConstraint>", out);
  } else {
    fputs("<ListBucketResult" SPACE ">", out);
    pthread_mutex_lock(&lock);
    list_page(r, out);
    pthread_mutex_unlock(&lock);
    fputs("</ListBucketResult>", out);
  }
  fclose(out);
  bool good = answer(c, r, 200, XML, text, size);
  free(text);
  return good;
}

static bool served_by(line *c, request *r) {
  char id[64];
  if (r->full) return fault(c, r, 507, "InsufficientStorage");
  if (!*r->key) {
    if (r->method == POST && asked(r, "delete", id, sizeof id)) return delete_many(c, r);
    if (r->method == GET) return list(c, r);
    return plain(c, r, r->method == DELETE ? 204 : 200, "");
  }
  if (r->method == GET || r->method == HEAD) return get(c, r);
  if (r->method == PUT) return put(c, r);
  if (r->method == DELETE) return delete_one(c, r);
  if (asked(r, "uploads", id, sizeof id)) return begin_upload(c, r);
  if (asked(r, "uploadId", id, sizeof id)) return complete(c, r, id);
  return fault(c, r, 501, "NotImplemented");
}

/* --- requests of its own -------------------------------------------------------------------------- */

static void write_table(FILE *out, const char *name, const long *values, const char *const *names,
                        int count) {
  bool first = true;
  fprintf(out, "\"%s\": {", name);
  for (int i = 0; i < count; i++) {
    if (!values[i]) continue;
    fprintf(out, "%s\"%s\": %ld", first ? "" : ", ", names[i], values[i]);
    first = false;
  }
  fputs("}, ", out);
}

static bool own(line *c, request *r) {
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (!out) return false;
  pthread_mutex_lock(&lock);
  fputc('{', out);
  write_table(out, "requests", served.methods, METHODS, N_METHODS);
  write_table(out, "kinds", served.kinds, KINDS, N_KINDS);
  fprintf(out, "\"received\": %llu, \"sent\": %llu, \"busy\": %ld, \"slow\": %ld, ", served.received,
          served.sent, served.busy, served.slow);
  fprintf(out, "\"connections\": %ld, \"at_once\": %ld, \"processor_s\": %.6f}", served.connections,
          served.at_once, processor_s() - served.processor_s);
  if (r->method == POST) begin_counts();
  pthread_mutex_unlock(&lock);
  fclose(out);
  if (r->method == DELETE) empty_all();
  if (r->method == PUT && !r->full) {
    char *json = text_of(&r->data);
    if (json) set_pace(json);
    free(json);
  }
  bool good = answer(c, r, 200, "Content-Type: application/json\r\n", text, size);
  free(text);
  return good;
}

/* --- requests --------------------------------------------------------------------------------------- */

static int kind_of(const request *r) {
  char ignored[8];
  bool has_upload = asked(r, "uploadId", ignored, sizeof ignored);
  if (!*r->key) {
    static const int of_bucket[] = {K_LIST, K_BUCKET_PUT, K_BUCKET_HEAD, K_BUCKET_POST,
                                    K_BUCKET_DELETE};
    return of_bucket[r->method];
  }
  if (r->method == POST && asked(r, "uploads", ignored, sizeof ignored)) return K_CREATE;
  if (!has_upload) return r->method;
  static const int of_upload[] = {GET, K_PART, HEAD, K_COMPLETE, K_ABORT};
  return of_upload[r->method];
}

/* Counts a request; tells the seconds until its answer, and whether it is one too many. */
static void arrived(line *c, const request *r, double *wait_s, bool *full) {
  double now = now_s();
  pthread_mutex_lock(&lock);
  served.methods[r->method]++;
  served.kinds[kind_of(r)]++;
  if (c->counted != served.serial) served.connections++;
  c->counted = served.serial;
  if (++on_the_way > served.at_once) served.at_once = on_the_way;
  *full = pace.busy_above > 0 && (double)on_the_way > pace.busy_above;
  if (pace.busy_rate > 0) {
    double earned = credit + (now - credited) * pace.busy_rate;
    credit = earned < pace.busy_rate ? earned : pace.busy_rate;
    credited = now;
    *full = *full || credit < 1;
    if (!*full) credit -= 1;
  }
  long every = (long)pace.slow_every, number = 0;
  for (int i = 0; i < N_METHODS; i++) number += served.methods[i];
  bool slow = every > 0 && number % every == (every - 1 < 10 ? every - 1 : 10);
  *wait_s = pace.latency_s + (slow ? pace.slow_s : 0);
  served.busy += *full;
  served.slow += slow;
  pthread_mutex_unlock(&lock);
}

static const char *value_of(const char *header, const char *name) {
  size_t size = strlen(name);
  if (strncasecmp(header, name, size)) return NULL;
  return header + size + strspn(header + size, " ");
}

/* Reads a header into a request. */
static void note(request *r, const char *header) {
  const char *value;
  if ((value = value_of(header, "content-length:"))) r->length = strtoull(value, NULL, 10);
  if ((value = value_of(header, "content-encoding:")) && strstr(value, "aws-chunked")) r->framed = true;
  if ((value = value_of(header, "transfer-encoding:")) && strstr(value, "chunked")) r->framed = true;
  if (value_of(header, "expect:")) r->expects = true;
  if ((value = value_of(header, "if-none-match:")) && *value == '*') r->if_absent = true;
  if ((value = value_of(header, "x-amz-copy-source:"))) {
    snprintf(r->source, sizeof r->source, "%s", value + strspn(value, "/"));
    unquote(r->source, false);
  }
  if ((value = value_of(header, "if-match:"))) snprintf(r->if_match, sizeof r->if_match, "%s", value);
  if ((value = value_of(header, "range:"))) snprintf(r->range, sizeof r->range, "%s", value);
  if ((value = value_of(header, "connection:")) && !strcasecmp(value, "close")) r->closes = true;
}

/* Reads the head of a request; returns whether it is one. */
static bool parse(char *head, request *r) {
  char *rest = strstr(head, "\r\n"), *target = strchr(head, ' ');
  if (rest) *rest = 0;
  char *end = target ? strchr(target + 1, ' ') : NULL;
  if (!end) return false;
  *target++ = 0;
  *end = 0;
  r->method = 0;
  while (r->method < N_METHODS && strcmp(head, METHODS[r->method])) r->method++;
  if (r->method == N_METHODS) return false;
  char *query = strchr(target, '?');
  if (query) *query++ = 0;
  if (strlen(target) >= sizeof r->path || (query && strlen(query) >= sizeof r->path)) return false;
  snprintf(r->path, sizeof r->path, "%s", target + strspn(target, "/"));
  unquote(r->path, false);
  r->query = query ? strdup(query) : NULL;
  r->key = r->path + strcspn(r->path, "/");
  if (*r->key) r->key++;
  while (rest) {
    char *header = rest + 2;
    rest = strstr(header, "\r\n");
    if (rest) *rest = 0;
    note(r, header);
  }
  return true;
}

/* Serves one request; returns whether the connection goes on. */
static bool one(line *c, request *r) {
  if (!strncmp(r->path, "-/", 2)) return receive(c, r) && own(c, r);
  double wait_s;
  bool full, good = true;
  arrived(c, r, &wait_s, &full);
  if (r->expects && !full) good = send_all(c, "HTTP/1.1 100 Continue\r\n\r\n", 25, 0);
  if (good && !(r->expects && full)) good = receive(c, r);
  if (good) {
    pause_s(wait_s);
    good = full ? fault(c, r, 503, "SlowDown") : served_by(c, r);
  }
  pthread_mutex_lock(&lock);
  on_the_way--;
  pthread_mutex_unlock(&lock);
  return good && !r->closes;
}

static void *connection(void *argument) {
  line *c = argument;
  int yes = 1, buffer = 2 * BLOCK;
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  pthread_mutex_lock(&lock);
  c->rate = pace.bytes_per_s;
  pthread_mutex_unlock(&lock);
  if (c->rate > 0) { /* two steps: the reader finds each one complete, and sleeps for the rest */
    setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
  }
  request *r = malloc(sizeof *r);
  for (bool goes_on = r != NULL; goes_on;) {
    *r = (request){0};
    char *head = until(c, "\r\n\r\n");
    goes_on = head && parse(head, r) && one(c, r);
    give_back(&r->data);
    free(r->query);
  }
  close(c->fd);
  free(r);
  free(c);
  pthread_mutex_lock(&lock);
  connections_open--;
  pthread_mutex_unlock(&lock);
  return NULL;
}

static void serve(int listener) {
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&small, STACK);
  for (;;) {
    int fd = accept(listener, NULL, NULL);
    if (fd < 0) {
      pause_s(0.01);
      continue;
    }
    pthread_mutex_lock(&lock);
    bool fits = connections_open < CONNECTIONS_MOST;
    connections_open += fits;
    pthread_mutex_unlock(&lock);
    line *c = fits ? calloc(1, sizeof *c) : NULL;
    pthread_t thread;
    if (c) c->fd = fd;
    if (c && !pthread_create(&thread, &small, connection, c)) continue;
    free(c);
    close(fd);
    pthread_mutex_lock(&lock);
    connections_open -= fits;
    pthread_mutex_unlock(&lock);
  }
}

int main(int count, char **arguments) {
  if (count != 2) {
    fputs("usage: slow_s3 '{\"port\": 9000, \"bytes_per_s\": 10e6}'\n", stderr);
    return 2;
  }
  const char *json = arguments[1];
  signal(SIGPIPE, SIG_IGN);
  double ready = number_of(json, "ready_bytes");
  if (!make_arena((size_t)ready)) {
    perror("slow_s3: memory");
    return 1;
  }
  make_ready((size_t)ready);
  set_pace(json);
  int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  struct sockaddr_in at = {.sin_family = AF_INET,
                           .sin_port = htons((uint16_t)number_of(json, "port")),
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 512)) {
    perror("slow_s3: port");
    return 1;
  }
  serve(listener);
}
